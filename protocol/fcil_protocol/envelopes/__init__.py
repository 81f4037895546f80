"""Sealed payloads: header, sealing, storage form and chunked transfer.

An *envelope* is a payload that one receiver can open; its *header* names the sender and the hash of
each *chunk*; a *window* is the data that a receiver requests at a time.
"""
