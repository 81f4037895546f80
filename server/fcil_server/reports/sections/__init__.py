"""Sections of the live page and of the report.

A *section* is one part of the page with a template of its own.
"""
