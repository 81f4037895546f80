"""Sinks of a run's metrics besides its own files: TensorBoard, MLflow, W&B, and others.

Each sink of ``[sinks]`` is a separate process that reads the ledger (`follower`); the server
only wakes it (`process`). A sink that hangs, fails or is far away costs the federation nothing, and
catches up when it is back. `contract` is the interface for third parties, `registry` finds sinks by
their entry points; docs/sinks.md is the user's page.
"""
