"""Notes for the operator about connections that were cut because they sent too much."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from fcil_protocol.errors import FcilError

AGAIN_S = 60.0  # between two notes about one key: flooding clients come back at once
_MAX_KEYS = 1000  # keys whose last note is remembered


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
