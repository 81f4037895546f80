"""Checks of ``fcil-client doctor``: the machine, and a client's requirements of it.

A section has a module in `probes`, which gathers facts, and one in `checks`, which turns them into
lines and does nothing else. `examination` does both, in the order in which people read them.
"""
