"""Shared code of methods with prompts.

A *prompt* is a set of learned tokens; a *pool* holds several, and a *prefix* puts them before keys
and values of an attention.
"""
