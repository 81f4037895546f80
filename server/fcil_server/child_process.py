"""Limits for processes next to the server, which must never delay a round."""

from __future__ import annotations

import contextlib
import os
import resource

MEMORY_BYTES = 512 << 20  # beyond it the process ends, and is restarted
NICE = 5  # a round comes first


def limit(files: int) -> None:
    """Limit this process's use of the server's machine.

    Args:
        files: open files allowed, connections among them.
    """
    os.nice(NICE)
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_NOFILE, files)):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (bound, bound))
