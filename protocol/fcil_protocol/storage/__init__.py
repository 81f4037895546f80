"""Bytes on disk that survive a crash: atomic files and the spool.

A *spool* keeps sealed updates until a state holds them; it consists of *segments*, files of
checked records that are only ever appended to.
"""
