"""Named tensors and their schemas: what may travel at all.

A *payload* is a set of named tensors with a little metadata; a *schema* says which names, shapes,
dtypes and values it may have. An upload rule says what a schema for uploads may contain.
"""
