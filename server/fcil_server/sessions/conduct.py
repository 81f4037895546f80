"""Which member sends too much that is refused, and for how long it is not heard then.

Every member has a bucket that fills with what the server need not have been told and empties
at ten a second: 600 are borne at once, and ten a second permanently. Whose bucket overflows is cut
off for a minute, and for twice as long each time that it happens again. It stays a member. Pure
but for its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.ids import ClientId

MOST = 600  # refused or needless messages at once; with one more the sender is cut off
WINDOW_S = 60.0  # in which a full bucket empties: 10 a second
PAUSE_S = 60.0  # the first time
LONGEST_S = 3600.0
FORGIVEN_S = 3600.0  # without another pause; then the next one is as short as the first
ANNOUNCED = 5  # what one list of classes counts as: up to 10,000 names are looked up for it


@dataclass
class _Record:
    level: float
    at: float
    pause_s: float = 0.0
    until: float = 0.0


class Conduct:
    """What each member has sent without need, and who is cut off until when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[ClientId, _Record] = {}

    def needless(self, client: ClientId, count: float = 1.0) -> float:
        """Count what was refused or not needed; returns for how long to cut the client off.

        0: it is heard, or is cut off already.
        """
        now = self._clock()
        record = self._records.setdefault(client, _Record(0.0, now))
        if now < record.until:
            return 0.0
        record.level = max(0.0, record.level - (now - record.at) * MOST / WINDOW_S) + count
        record.at = now
        if record.level <= MOST:
            return 0.0
        again = record.pause_s and now < record.until + FORGIVEN_S
        record.pause_s = min(LONGEST_S, 2 * record.pause_s) if again else PAUSE_S
        record.until = now + record.pause_s
        record.level = 0.0
        return record.pause_s

    def left(self, client: ClientId) -> float:
        """Return for how many seconds more a client is not heard; 0: it is."""
        record = self._records.get(client)
        return max(0.0, record.until - self._clock()) if record else 0.0
