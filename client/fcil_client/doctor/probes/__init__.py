"""Collect the facts that the checks take from this machine."""
