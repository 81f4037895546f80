"""Who passes the gate: members, and a few guests who may say one thing.

A guest holds a ticket, or was a member once. A ticket's holder may ask to be enrolled; who
was revoked or has expired is told so. Everybody else gets a number from the gate and no word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

GUEST_BURST = 20  # guests' handshakes that pass at once
SAME_GUEST_S = 1.0  # between two handshakes with one key, so that one guest leaves room for others
MAX_SEEN = 10_000  # keys whose last handshake is remembered
GUESTS_PER_S = 2.0  # and after those, this many in a second


class Doorkeeper:
    """Answers the gate, from the gate's own thread; the daemon changes the lists.

    Lists are replaced, never changed, so a handshake sees the old one or the new one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._members: frozenset[bytes] = frozenset()
        self._guests: frozenset[bytes] = frozenset()
        self._clock = clock
        self._seen: dict[bytes, float] = {}  # guest key -> its last handshake that passed
        self._left = float(GUEST_BURST)
        self._at = clock()

    def __call__(self, key: bytes) -> bool:
        """Say whether a handshake with this CURVE key passes; asked by one thread only."""
        if key in self._members:
            return True
        return key in self._guests and self._guest_passes(key)

    def _guest_passes(self, key: bytes) -> bool:
        now = self._clock()
        if now < self._seen.get(key, -SAME_GUEST_S) + SAME_GUEST_S:
            return False
        self._left = min(GUEST_BURST, self._left + (now - self._at) * GUESTS_PER_S)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[key] = now
        return True

    def is_member(self, key: bytes) -> bool:
        """Say whether a key is on the allow-list."""
        return key in self._members

    def admit(self, key: bytes) -> None:
        """Make a key a member's, from its next handshake on."""
        self._members |= {key}
        self._guests -= {key}

    def replace(self, members: Iterable[bytes], guests: Iterable[bytes]) -> None:
        """Let in these and nobody else, from the next handshake on."""
        self._members, self._guests = frozenset(members), frozenset(guests)

    def invite(self, key: bytes) -> None:
        """Let a key in as a guest, from its next handshake on; a member is one no more."""
        self._guests |= {key}
        self._members -= {key}

    def forget(self, key: bytes) -> None:
        """Make a key nobody's: it does not pass any more."""
        self._guests -= {key}
        self._members -= {key}
