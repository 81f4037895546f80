"""Aggregation: from updates to the next state and its broadcast.

A *state* is a method's data between rounds; a *broadcast* is the sealed *parts* of it that clients
fetch.
"""
