"""Methods and models: what learns on clients and what combines on the server.

`contract`, `registry`, `arrays`, `statistics`, `images` and the method manifests need no
torch; workers load the torch halves by name through the registry.
"""
