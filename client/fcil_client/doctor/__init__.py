"""What ``fcil-client doctor`` looks at: a machine, and what a client needs of it.

A section has a module in `probes`, which gathers facts, and one in `checks`, which turns them into
lines and does nothing else. `examination` does both, in the order in which people read them.
"""
