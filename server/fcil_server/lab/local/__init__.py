"""A complete federation on this machine, and the demo."""
