"""The HTTP API of a federation, for other programs.

An *endpoint* is one method of one address, with the role that it needs and the models of its input
and its answer; the answers and the OpenAPI document are made from the same models.
"""
