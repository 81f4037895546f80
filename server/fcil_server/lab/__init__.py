"""The laboratory: a table of a paper as one TOML, run cell by cell through real processes.

The way of one experiment (`engine.Engine`): `experiment.load` checks the TOML whole; `plan.make`
lists its cells (row x partition x seed) with a key each; `runner.run` has every cell that is not
in the results folder computed by `cell.run` (a server, a swarm, both as processes);
`summary.entries` makes means and deviations of them, `report` the pages and `records` the tables.
`docs/lab.md` is the user's page, `docs/python.md` that of `fcil_server.api`.
"""
