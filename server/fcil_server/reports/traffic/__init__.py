"""Predicted bytes, budgets and the numbers of papers.

A *budget* bounds the bytes of one round; the prediction derives them from schemas before a run.
"""
