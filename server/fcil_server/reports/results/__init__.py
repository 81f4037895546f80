"""A run read from the ledger, its metrics and the formats of its numbers."""
