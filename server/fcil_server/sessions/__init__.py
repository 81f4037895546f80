"""Connected clients and their uploads.

A *peer* is a connected client; a *guest* holds a ticket only; the *intake* receives, opens and
checks updates.
"""
