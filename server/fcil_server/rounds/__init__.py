"""One round after another: the state machine and its driver.

The *machine* decides; the *coordinator* executes; a *schedule* lists the rounds of a task.
"""
