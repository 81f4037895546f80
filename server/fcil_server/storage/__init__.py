"""Backup, restore and check of a federation directory.

An *archive* is one backup file; a *finding* is one result of a check.
"""
