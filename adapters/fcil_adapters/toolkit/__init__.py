"""Shared code of the families of methods.

A method imports from here and never from another method.
"""
