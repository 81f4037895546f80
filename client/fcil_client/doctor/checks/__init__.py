"""Facts to findings: each check is pure."""
