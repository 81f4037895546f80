"""Many clients in one process, or in groups of processes.

A *member* is one client of a swarm; a *seat* is its folder and its place in a partition.
"""
