"""What a client keeps on disk.

A *home* is the directory of one membership; the *outbox* holds sealed updates; the *sent journal*
lists what left the device; the *privacy budget* counts what was spent.
"""
