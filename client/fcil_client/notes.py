"""A client's notes to the person at its terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT = 100  # notes, for the status


@dataclass(frozen=True)
class Note:
    """One line for the person at the terminal."""

    at: float
    level: str
    text: str


class Notes:
    """The newest notes, each shown when it is made.

    Args:
        notify: shows a note in the terminal or the log.
    """

    def __init__(self, notify: Callable[[Note], None]) -> None:
        self._notify = notify
        self._kept: deque[Note] = deque(maxlen=KEPT)
        self._standing: dict[str, str] = {}

    def __call__(self, level: str, text: str) -> None:
        """Show and keep one note: ``info``, ``warning`` or ``error``."""
        note = Note(time.time(), level, text)
        self._kept.append(note)
        self._notify(note)

    def once(self, topic: str, level: str, text: str) -> None:
        """Note a lasting problem; repeat it only after another of its topic."""
        if self._standing.get(topic) != text:
            self._standing[topic] = text
            self(level, text)

    def over(self, topic: str) -> None:
        """End a lasting problem: its next occurrence is noted again."""
        self._standing.pop(topic, None)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the newest notes, JSON-ready, oldest first."""
        return [{"at": n.at, "level": n.level, "text": n.text} for n in self._kept][-count:]
