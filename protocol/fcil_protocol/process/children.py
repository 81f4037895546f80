"""The command that starts another process of fcil, and the child's end with its parent."""

from __future__ import annotations

import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a process of its own, with this Python.

    ``python -m`` alone puts the current directory before all installed packages, so a ``PIL.py`` or
    ``json.py`` in it (part of a data set) would run as this user. ``-P`` leaves the directory out.

    Args:
        module: found among installed packages, or in ``PYTHONPATH``.
        words: its arguments.
    """
    return [sys.executable, "-P", "-m", module, *words]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent's thread ends; Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
