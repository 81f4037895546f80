"""Finds connections that bring more than is read, before they have filled the memory.

libzmq bounds its queues in whole messages, so a message without end fills them unseen. Asking
the kernel for the counts of a thousand connections takes 2 ms; asking for the memory of this
process takes 7 us, and to wake up for it ten times that. So memory is looked at 40 times a
second, more often while it grows, and the connections when it has grown, and once a second in
any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable

TICK_MS = 25  # between two looks at the memory; at 1 GB/s a flood brings 25 MB in it
HASTE_MS = 5  # while memory grows
GROWING_BYTES = 1 << 20  # from one look to the next
STEP_BYTES = 8 << 20  # growth at which connections are looked at
LOOK_S = 1.0  # between two looks when memory does not grow


def resident_bytes() -> int:
    """Return how many bytes this process has in memory; 0 where the system does not say."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def give_back() -> None:
    """Give memory that is free, but held by the allocator, back to the system (glibc alone)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class FloodWatch:
    """Called as often as it says, it looks at the connections when that is due.

    Args:
        look: looks at all connections, cuts those that flood, and says whether there were any;
            called with the time.
        memory: bytes that this process has in memory.
        clock: seconds that do not jump.
        give_back: called when what a flood left has been freed: millions of small pieces
            between others, of which the allocator would keep a few MB each time.
    """

    def __init__(
        self,
        look: Callable[[float], bool],
        *,
        memory: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
        give_back: Callable[[], None] = give_back,
    ) -> None:
        self._look = look
        self._memory = memory
        self._clock = clock
        self._give_back = give_back
        self._flooded = False
        self._floor = self._last = memory()
        self._due = clock() + LOOK_S

    def flooded(self) -> None:
        """Take the news that somebody else found a flood and ended it."""
        self._flooded = True

    def tick(self) -> int:
        """Look at the connections if memory has grown, or if it was long ago.

        Returns:
            Milliseconds until the next call.
        """
        memory, now = self._memory(), self._clock()
        grows, self._last = memory - self._last >= GROWING_BYTES, memory
        self._floor = min(self._floor, memory)
        if memory - self._floor >= STEP_BYTES or now >= self._due:
            self._floor, self._due = memory, now + LOOK_S
            self._look_and_tidy(now)
        return HASTE_MS if grows else TICK_MS

    def _look_and_tidy(self, now: float) -> None:
        if self._look(now):
            self._flooded = True
        elif self._flooded:
            self._flooded = False
            self._give_back()
