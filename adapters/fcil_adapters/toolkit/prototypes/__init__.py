"""Shared code of PILoRA and PLoRA, and the rows that FedProto shares with them.

A *prototype* is one learned vector for each class; the server reweights the clients' prototypes by
their distance to the class's mean.
"""
