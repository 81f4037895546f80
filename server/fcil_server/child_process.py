"""Bounds for processes beside the server, which must never keep it from a round."""

from __future__ import annotations

import contextlib
import os
import resource

MEMORY_BYTES = 512 << 20  # beyond it the process ends, and is started again
NICE = 5  # a round comes first


def limit(files: int) -> None:
    """Bound what this process may take from the server's machine.

    Args:
        files: that it may have open, connections among them.
    """
    os.nice(NICE)
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_NOFILE, files)):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (bound, bound))
