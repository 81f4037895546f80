"""Budget of notes per origin: the first notes in full, the rest as a count.

A client that can cause a note can cause a million. Each origin has a bucket of notes that are
written in full; while it is empty, notes are held back and counted, and written later as one line
with the newest text. Nothing is left uncounted. Pure: times are seconds of one clock, passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from fcil_protocol.process.token_bucket import TokenBucket

BURST = 60  # notes of one origin that are written in full at once
EVERY_S = 3.0  # seconds between further ones
MINUTE_S = 60.0  # after which held-back notes are written, even while more are coming
K = TypeVar("K")


@dataclass
class Held(Generic[K]):
    """Notes of one kind that were held back.

    Attributes:
        key: their origin and kind.
        text: of the newest one.
        count: their number.
        since: when the first one was held back.
    """

    key: K
    text: str
    count: int
    since: float

    @property
    def summary_line(self) -> str:
        """The one line that stands for all of them."""
        return (
            self.text if self.count == 1 else f"{self.text} (and {self.count - 1:,} more like it)"
        )


class NoteBudget(Generic[K]):
    """The buckets of all origins, and the held-back notes."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._held: dict[tuple[str, K], Held[K]] = {}

    @property
    def holds(self) -> bool:
        """True if held-back notes are not written yet."""
        return bool(self._held)

    def take(self, origin: str, key: K, text: str, now: float) -> bool:
        """Return True if a note is to be written in full; otherwise hold it back and count it."""
        if self._draw(origin, now):
            return True
        held = self._held.setdefault((origin, key), Held(key, text, 0, now))
        held.count += 1
        held.text = text
        return False

    def due(self, now: float, *, everything: bool = False) -> list[Held[K]]:
        """Return the notes due now: their origin has room again, or their minute is over."""
        found = []
        for place, held in list(self._held.items()):
            if everything or now - held.since >= MINUTE_S or self._draw(place[0], now):
                del self._held[place]
                found.append(held)
        for origin, bucket in list(self._buckets.items()):
            bucket.fill(now)
            if bucket.left >= BURST:  # as if it had never written a note
                del self._buckets[origin]
        return found

    def reword(self, change: dict[tuple[str, K], str]) -> None:
        """Replace the texts of held-back notes."""
        for place, text in change.items():
            self._held[place].text = text

    def texts(self) -> dict[tuple[str, K], str]:
        """Return the texts of held-back notes."""
        return {place: held.text for place, held in self._held.items()}

    def _draw(self, origin: str, now: float) -> bool:
        fresh = TokenBucket(BURST, 1 / EVERY_S, BURST, now)
        return self._buckets.setdefault(origin, fresh).draw(now)
