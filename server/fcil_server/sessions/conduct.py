"""Flood limit: members that send too many refused messages are cut off; notes about every cut.

Every member has a bucket that fills with refused or needless messages and empties at ten a second:
it tolerates 600 at once, and ten a second permanently. A member whose bucket overflows is cut off
for a minute, and for twice as long each further time. It stays a member. Pure but for its clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId

MOST = 600  # refused or needless messages at once; one more cuts the sender off
WINDOW_S = 60.0  # time in which a full bucket empties: 10 a second
PAUSE_S = 60.0  # the first time
LONGEST_S = 3600.0
FORGIVEN_S = 3600.0  # without another pause; then the next one is as short as the first
ANNOUNCED = 5  # weight of one list of classes: up to 10,000 names are looked up for it
AGAIN_S = 60.0  # between two notes about one key: flooding clients come back at once
_MAX_KEYS = 1000  # keys whose last note is remembered


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


class Floods:
    """Writes notes about cut connections, with the number of cuts since the last note.

    Args:
        name: returns the name of the holder of a CURVE key; an empty key means that it never spoke.
        notify: takes a sentence.
        count: takes the key, each time.
        clock: seconds that do not jump.
    """

    def __init__(
        self,
        name: Callable[[bytes], str],
        notify: Callable[[str], None],
        count: Callable[[bytes], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._notify = notify
        self._count = count
        self._clock = clock
        self._told: dict[bytes, tuple[float, int]] = {}  # key -> time of its last note, cuts since

    def cut(self, key: bytes, why: str) -> None:
        """Handle the cut of a connection, with its reason."""
        with contextlib.suppress(FcilError):  # a ledger that cannot be read
            self._tell(key, why)
            self._count(key)

    def _tell(self, key: bytes, why: str) -> None:
        now = self._clock()
        at, since = self._told.get(key, (now - AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._told[key] = (at, since + 1)
            return
        if len(self._told) >= _MAX_KEYS:
            self._told.clear()
        self._told[key] = (now, 0)
        more = f" ({since} more times in the last minutes)" if since else ""
        self._notify(f"the connection of {self._name(key)} was cut: {why}{more}")
