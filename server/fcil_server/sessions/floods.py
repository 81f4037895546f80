"""Connections that were cut because they brought more than they may, as the operator hears it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from fcil_protocol.errors import FcilError

AGAIN_S = 60.0  # between two notes about one key: who floods comes back at once
_MAX_KEYS = 1000  # whose last note is remembered


class Floods:
    """Says who was cut, and how often since it was last said.

    Args:
        name: returns what to call the holder of a CURVE key; of an empty one, who never spoke.
        say: takes a sentence.
        count: takes the key, each time.
        clock: seconds that do not jump.
    """

    def __init__(
        self,
        name: Callable[[bytes], str],
        say: Callable[[str], None],
        count: Callable[[bytes], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._say = say
        self._count = count
        self._clock = clock
        self._told: dict[bytes, tuple[float, int]] = {}  # key -> when it was said, cut since

    def cut(self, key: bytes, why: str) -> None:
        """Take the news that a connection was cut, with the reason."""
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
        self._say(f"the connection of {self._name(key)} was cut: {why}{more}")
