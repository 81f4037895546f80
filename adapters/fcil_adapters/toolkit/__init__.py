"""What families of methods share.

A method imports from here and never from another method.
"""
