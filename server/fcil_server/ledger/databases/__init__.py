"""The databases that can hold the ledger, each with the same tables.

`opening.open_database` opens the one that a federation has: a file in its directory (`sqlite`, the
default), or tables in Postgres (`postgres`), where `place` says so. Both are a `database.Database`:
transactions, statements, and readings that are remembered. Statements are written once, in SQLite's
dialect as far as Postgres has the same; `postgres_connection` translates the rest. The tables are
described once, too: `schema` has SQLite's scripts, and `postgres_tables` makes Postgres's of them.
"""
