"""The database: schema, tables, rows and queries.

The *ledger* records what the server must know after a restart. `ledger.Ledger` opens it
(`databases`: a file, or tables in Postgres) and has its tables by name, each with the queries
about it:

- `clients`: `Ledger.clients` (members and their keys, erased keys), `Ledger.tickets`;
- `runs`: `Ledger.runs`, `Ledger.states`, `Ledger.parts` (sealed parts of broadcasts), and
  `Ledger.forks`, which copies the rows of a run to a new one;
- `tasks`: `Ledger.classes` (names and aliases), `Ledger.tasks`, `Ledger.evaluations`;
- `rounds`: `Ledger.rounds`, `Ledger.updates`, `Ledger.answers` (why there was no update);
- `byte_counts`: `Ledger.bytes`;
- `events`: `Ledger.events`, `Ledger.refusals` (refused messages and their counts),
  `Ledger.audit` (operator actions).

A *row* is one record of a table, a dataclass of `rows` in the words of `enums`; `databases.schema`
has the tables as SQL.

Raises:
    DiskFull, StorageError, Locked, CorruptFile: from every method that reads or writes.
"""
