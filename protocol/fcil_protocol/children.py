"""How a program of the federation starts another one: always by this command."""

from __future__ import annotations

import sys


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a process of its own, with this Python.

    ``python -m`` alone puts the current directory before all installed packages, so a ``PIL.py``
    or ``json.py`` that lies in it (a data set brings it) would be run as this user. ``-P`` leaves
    the directory out.

    Args:
        module: is found where packages are installed, or in ``PYTHONPATH``.
        words: its arguments.
    """
    return [sys.executable, "-P", "-m", module, *words]
