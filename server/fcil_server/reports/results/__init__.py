"""Results of a run read from the ledger, its rounds and its metrics."""
