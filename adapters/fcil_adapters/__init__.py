"""Methods and models: the code that learns on clients and the code that combines on the server.

`contract`, `images`, `resources`, `worker` and the methods' manifests need no torch; workers load
the torch halves by name through `contract.registry`.
"""
