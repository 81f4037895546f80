"""The laboratory: a table of a paper as one TOML, run cell by cell through real processes.

The way of one experiment: `experiment.load` checks the TOML whole; `plan.make` lists its cells
(row x partition x seed) with a key each; `runner.run` has every cell that is not in the results
folder computed by `cell.run` (a server, a swarm, both as processes); `summary.tables` makes means
and deviations of them, and `markdown`, `html` the report. `docs/lab.md` is the user's page.
"""
