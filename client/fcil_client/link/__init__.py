"""The connection to the server and the handshake.

A *visit* is one short connection for one question; *terms* are a server's demands on clients.
"""
