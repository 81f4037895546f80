"""The worker process, from both ends of its pipe.

A *worker* loads torch and computes; the *host*, in the daemon, starts it and sends it *calls*
through a *pipe*.
"""
