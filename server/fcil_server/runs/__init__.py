"""Life of a run: open, recover, fork, forget, erase and export.

A *run* is one training with one method; a *fork* begins a new run from a state of another.
"""
