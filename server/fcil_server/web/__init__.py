"""A bounded HTTP server in a child process.

A *site* is what such a process serves; the *supervisor* starts the process and starts it again.
"""
