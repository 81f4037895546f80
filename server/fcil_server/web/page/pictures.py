"""The pictures of a run's directory: the plots of a run, and no other file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

NAMES = frozenset(
    f"{name}.{kind}"
    for name in ("accuracy", "accuracy_matrix", "bytes_per_round", "seconds_per_round")
    for kind in ("png", "svg")
)
MAX_BYTES = 16 << 20
TYPES = {"png": "image/png", "svg": "image/svg+xml"}


def names(directory: Path, run: str) -> list[str]:
    """Return the names of a run's existing pictures."""
    try:
        found = set(os.listdir(directory / "runs" / run))  # noqa: PTH208 - names alone
    except OSError:
        return []
    return sorted(NAMES & found)


def load(directory: Path, run: str, name: str) -> tuple[bytes, str] | None:
    """Return a picture and its media type; None if there is no such one.

    Args:
        directory: of the federation.
        run: one of its runs, which the caller has verified.
        name: of the picture.
    """
    if name not in NAMES:
        return None
    path = directory / "runs" / run / name
    try:
        # No link is followed: its target is not the run's. No pipe is waited for.
        how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, how), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            return file.read(MAX_BYTES), TYPES[name.rpartition(".")[2]]
    except OSError:
        return None
