"""A client's notes to the person at its terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT = 100  # notes, for the status
AT_ONCE = 5  # notes that a peer can cause at will, and then one in `EACH_S`
EACH_S = 10.0


@dataclass(frozen=True)
class Note:
    """One line for the person at the terminal."""

    at: float
    level: str
    text: str


@dataclass
class _Budget:
    """Notes of one topic that may be made now, as of a time, and those held back since the last."""

    at: float
    left: float = AT_ONCE
    held: int = 0


class Notes:
    """The newest notes, each shown when it is made.

    Args:
        notify: shows a note in the terminal or the log.
        clock: monotonic seconds.
    """

    def __init__(
        self, notify: Callable[[Note], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._budgets: dict[str, _Budget] = {}  # by topic
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

    def now_and_then(self, topic: str, level: str, text: str) -> None:
        """Note what a peer can cause a thousand times a second; most are only counted."""
        now = self._clock()
        budget = self._budgets.setdefault(topic, _Budget(now))
        budget.left = min(AT_ONCE, budget.left + (now - budget.at) / EACH_S)
        budget.at = now
        if budget.left < 1:
            budget.held += 1
            return
        more, budget.held = budget.held, 0
        budget.left -= 1
        self(level, f"{text} ({more} more since the last of these lines)" if more else text)

    def over(self, topic: str) -> None:
        """End a lasting problem: its next occurrence is noted again."""
        self._standing.pop(topic, None)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the newest notes, JSON-ready, oldest first."""
        return [{"at": n.at, "level": n.level, "text": n.text} for n in self._kept][-count:]
