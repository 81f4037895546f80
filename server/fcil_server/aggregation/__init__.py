"""From updates to the next state and its broadcast.

A *state* is what a method keeps between rounds; a *broadcast* is the sealed *parts* of it that
clients fetch.
"""
