"""The SQLite database: schema, rows and queries.

The *ledger* records clients, runs, rounds, updates and bytes; a *row* is one record of a table.
"""
