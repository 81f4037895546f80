"""Results of tries to combine a round's updates, on disk for a restart.

One file per round: names of clients, sentences, seconds. Losing it costs time, not results.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fcil_protocol.errors import StorageError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

NAME = "trials.json"


class Trials:
    """Tries of one aggregation, by the set of updates.

    Attributes:
        spent_s: time of all tries after the first failure, in all starts together.
    """

    def __init__(self, path: Path | None, about: Iterable[str]) -> None:
        """Read the tries of an earlier start.

        Args:
            path: the file; None: nothing is kept.
            about: everything that the results depend on. Tries of another aggregation are ignored.
        """
        self._path = path
        self._about = _digest(about)
        self.spent_s = 0.0
        self._shown: dict[str, str] = {}
        kept = _read(path) if path is not None else {}
        if kept.get("about") == self._about:
            self.spent_s, self._shown = float(kept["spent_s"]), dict(kept["shown"])

    def shown(self, updates: Iterable[str]) -> str | None:
        """Return why a set of updates failed; empty: it worked; None: it was not tried."""
        return self._shown.get(_digest(updates))

    def note(self, updates: Iterable[str], reason: str, spent_s: float) -> None:
        """Keep the result of a try, and the time of all tries so far."""
        self._shown[_digest(updates)] = reason
        self.spent_s = spent_s
        if self._path is not None:
            fields = {"about": self._about, "spent_s": spent_s, "shown": self._shown}
            with contextlib.suppress(StorageError):  # a full disk: a restart tries again
                write_atomic(self._path, json.dumps(fields).encode(), sync=False)

    def forget(self) -> None:
        """Remove the file: its round is closed."""
        if self._path is not None:
            with contextlib.suppress(StorageError), storage_errors("remove", self._path):
                self._path.unlink(missing_ok=True)


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file; empty if it cannot be read."""
    try:
        kept = json.loads(path.read_bytes())
        shown, spent = kept["shown"], float(kept["spent_s"])
        whole = isinstance(shown, dict) and all(isinstance(v, str) for v in shown.values())
        return kept if whole and 0 <= spent < float("inf") else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
