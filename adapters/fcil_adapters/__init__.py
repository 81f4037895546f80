"""Methods and models: what learns on clients and what combines on the server.

`contract`, `images`, `resources`, `worker` and the methods' manifests need no torch; workers load
the torch halves by name through `contract.registry`.
"""
