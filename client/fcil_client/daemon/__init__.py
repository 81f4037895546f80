"""The running client: it executes the session's instructions.

A *conversation* is the exchange with the server over one link; the *host* is the interface of the
client's process to a client, alone or in a swarm.
"""
