"""A whole federation on this machine, and the demo."""
