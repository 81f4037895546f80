"""Browser sessions, keys, links and the check of every request."""
