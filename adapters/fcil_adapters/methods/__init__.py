"""The built-in methods, one folder each."""
