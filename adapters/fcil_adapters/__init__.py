"""Methods and models: the code that learns on clients and the code that combines on the server.

`contract`, `registry`, `arrays`, `statistics`, `images` and the method manifests need no torch;
workers load the torch halves by name through the registry.
"""
