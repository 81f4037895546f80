"""A client's notes to the person at its terminal."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fcil_protocol.process.token_bucket import TokenBucket

KEPT = 100  # notes, for the status
AT_ONCE = 5  # notes that a peer can cause at will, and then one in `EACH_S`
EACH_S = 10.0  # seconds


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
        clock: monotonic seconds.
    """

    def __init__(
        self, notify: Callable[[Note], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}  # by topic
        self._held = Counter[str]()  # notes of each topic that were held back since the last one
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
        fresh = TokenBucket(AT_ONCE, 1 / EACH_S, AT_ONCE, now)
        if not self._buckets.setdefault(topic, fresh).draw(now):
            self._held[topic] += 1
            return
        more = self._held.pop(topic, 0)
        self(level, f"{text} ({more} more since the last of these lines)" if more else text)

    def over(self, topic: str) -> None:
        """End a lasting problem: its next occurrence is noted again."""
        self._standing.pop(topic, None)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the newest notes, JSON-ready, oldest first."""
        return [{"at": n.at, "level": n.level, "text": n.text} for n in self._kept][-count:]
