"""A client's files on disk.

A *home* is the directory of one membership; the *outbox* holds sealed updates; the *sent journal*
lists what left the device; the *privacy budget* counts the epsilon that was spent.
"""
