"""Where a run's figures go besides its own files: TensorBoard, MLflow, and what others install.

Each sink of ``[sinks]`` is a process of its own that reads the ledger (`follower`); the server
only wakes it (`process`). A sink that hangs, fails or is far away costs the federation nothing, and
takes what it has missed when it is back. `contract` is what a third party writes, `registry` finds
it by its entry point; docs/sinks.md is the user's page.
"""
