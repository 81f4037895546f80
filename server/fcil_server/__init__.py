"""The server: a daemon that opens rounds, combines updates and keeps the ledger."""
