"""Files that survive a crash: atomic files and the spool.

A *spool* keeps sealed updates until a state holds them; it consists of *segments*, append-only
files of checked records.
"""
