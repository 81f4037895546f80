"""Flood limit: members that send too many refused messages are cut off for a while.

Every member has a bucket that fills with refused or needless messages and empties at ten a second:
it tolerates 600 at once, and ten a second permanently. A member whose bucket overflows is cut off
for a minute, and for twice as long each further time. It stays a member. Pure but for its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.ids import ClientId

MOST = 600  # refused or needless messages at once; one more cuts the sender off
WINDOW_S = 60.0  # time in which a full bucket empties: 10 a second
PAUSE_S = 60.0  # the first time
LONGEST_S = 3600.0
FORGIVEN_S = 3600.0  # without another pause; then the next one is as short as the first
ANNOUNCED = 5  # weight of one list of classes: up to 10,000 names are looked up for it


@dataclass
class _ConductRecord:
    level: float
    at: float
    pause_s: float = 0.0
    until: float = 0.0


class Conduct:
    """Needless messages of each member, and the pauses of those that are cut off."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[ClientId, _ConductRecord] = {}

    def count_needless(self, client: ClientId, count: float = 1.0) -> float:
        """Count refused or needless messages; return for how long to cut the client off.

        Returns 0 if it is not cut off, or is cut off already.
        """
        now = self._clock()
        record = self._records.setdefault(client, _ConductRecord(0.0, now))
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

    def remaining_s(self, client: ClientId) -> float:
        """Return for how many more seconds a client is cut off; 0: it is not."""
        record = self._records.get(client)
        return max(0.0, record.until - self._clock()) if record else 0.0
