"""Named tensors and their schemas: the only content that may travel.

A *payload* is a set of named tensors with a little metadata; a *schema* lists its allowed names,
shapes, dtypes and values. An upload rule limits the content of a schema for uploads.
"""
