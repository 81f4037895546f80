"""Bounded HTTP servers in child processes.

A *site* is the content and address of such a process; the *supervisor* starts and restarts it.
"""
