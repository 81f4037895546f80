"""Sessions that signed out, on disk, so that no copy of their cookie is valid after a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.errors import CorruptFile
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

MAX_LEFT = 1000  # sessions that are remembered
MAX_BYTES = 1 << 20  # of the file; a thousand take 50 kB
_ID = re.compile(r"[0-9a-f]{32}")


class LeftSessions:
    """The sessions that signed out, until none of their cookies can be valid any more.

    Args:
        path: of their file; None: only this process knows them.
        clock: unix seconds.
        life_s: lifetime of a cookie.

    Raises:
        CorruptFile: the file has another format, or is damaged.
        StorageError: it cannot be read.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float], life_s: float) -> None:
        self._path = path
        self._clock = clock
        self._life_s = life_s
        # In the order of signing out; times in unix seconds.
        self._left: dict[str, float] = _read(path) if path is not None else {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def add(self, name: str) -> None:
        """Remember a session; it is over at once, and on disk when this returns.

        Raises:
            DiskFull, StorageError: it is over only until this process ends.
        """
        now = self._clock()
        self._left[name] = now
        # As with the cookies: a clock that was set back revives no session.
        kept = [(n, at) for n, at in self._left.items() if abs(now - at) <= self._life_s]
        self._left = dict(kept[-MAX_LEFT:])
        if self._path is not None:
            write_atomic(self._path, json.dumps(self._left).encode())


def _read(path: Path) -> dict[str, float]:
    with storage_errors("read", path):
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
    try:
        found = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(_is_one, found.items())):
        raise CorruptFile(
            f"{path} is damaged: it lists the dashboard's sessions that signed out.",
            action="End all sessions: fcil-server page --sign-out",
        )
    return {name: float(at) for name, at in found.items()}


def _is_one(item: tuple[str, object]) -> bool:
    name, at = item
    is_number = isinstance(at, int | float) and not isinstance(at, bool)
    return is_number and _ID.fullmatch(name) is not None
