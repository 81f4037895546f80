"""The live dashboard of a federation.

A *board* keeps the newest form of each section; a *watch* reads the ledger for all open dashboards.
"""
