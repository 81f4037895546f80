"""Predicted bytes, budgets and the figures of papers.

A *budget* bounds the bytes of one round; the prediction tells them from schemas before a run.
"""
