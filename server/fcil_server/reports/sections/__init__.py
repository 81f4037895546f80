"""Sections of the live dashboard and of the report.

A *section* is one part of the dashboard with its own template.
"""
