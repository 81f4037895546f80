"""Checks of ``fcil-client doctor``: the machine, and a client's requirements of it.

`probes` ask the system and collect facts; `checks` judge the facts and do no I/O, one
registered function each; `examination` runs the probes, then the checks.
"""
