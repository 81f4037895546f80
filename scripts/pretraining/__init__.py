"""Pre-training of the small vision transformer that ships with fcil (docs/backbone.md)."""
