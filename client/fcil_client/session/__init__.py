"""The client's state machine: pure, without clock, socket or disk.

It turns *events* into instructions that the daemon executes.
"""
