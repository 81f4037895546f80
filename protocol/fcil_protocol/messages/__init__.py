"""Control messages: their fields, their frames and the signed session.

A *message* is one typed set of fields; *frames* are its parts on the link; a *signed session*
numbers and signs the messages of two sides. *Relay frames* carry several clients' messages.
"""
