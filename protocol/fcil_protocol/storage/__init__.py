"""Files that survive a crash: atomic files and the spool.

A *spool* keeps sealed updates until a state holds them, those of a round in a *segment*: an
append-only file of checked records, deleted whole.
"""
