"""The laboratory: a paper's table as one TOML, run cell by cell through real processes.

The steps of one experiment (`engine.Engine`): `experiment.load` checks the complete TOML;
`plan.make` lists its cells (row x partition x seed) with a key each; `runner.run` computes every
cell that is not in the results folder with `cell.run` (a server, a swarm, both as processes);
`summary.entries` makes means and deviations, `report` the pages and `records` the tables.
`docs/lab.md` is the user's page, `docs/python.md` that of `fcil_server.api`.
"""
