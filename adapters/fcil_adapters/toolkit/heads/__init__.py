"""Classifier heads that all families of methods share.

A *head* turns features into one score for each class; its *rows* belong to one class each.
"""
