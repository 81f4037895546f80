"""Training rounds: the state machine of a round and the driver of a run.

The *machine* decides; the *coordinator* executes; a *schedule* lists the rounds of a task.
"""
