"""Cores, memory and priority of this machine."""
