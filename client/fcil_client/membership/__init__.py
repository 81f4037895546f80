"""Enrol, ask for terms, rotate keys and leave.

A *member* is a client whose key the server knows.
"""
