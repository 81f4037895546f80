"""Keys, certificates, tickets and passphrases.

A *root key* signs the server's *certificate*; a *ticket* admits one new client; the *canonical*
form is the unique byte sequence of signed fields.
"""
