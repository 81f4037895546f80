"""Results of a run read from the ledger, its metrics and the formats of its numbers."""
