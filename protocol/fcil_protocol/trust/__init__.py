"""Keys, certificates, tickets and passphrases.

A *root key* signs the server's *certificate*; a *ticket* lets one new client in; the *canonical*
form is the one sequence of bytes of signed fields.
"""
