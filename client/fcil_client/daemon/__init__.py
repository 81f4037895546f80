"""The running client: it executes what the session decides.

A *conversation* is the exchange with the server over one link; the *host* is what the client's
process offers, alone or in a swarm.
"""
