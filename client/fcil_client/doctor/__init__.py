"""What ``fcil-client doctor`` looks at: a machine, and what a client needs of it.

`probes` ask the system and collect facts; `checks` look at facts and do nothing else, one
registered function for each; `examination` runs the ones and then the others.
"""
