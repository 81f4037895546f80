"""ZeroMQ sockets with CURVE: admission, kernel byte counts and dialling.

A *link* carries frames between two keys; the *gate* admits keys; a *guest* is a key that holds a
ticket only.
"""
