"""Detection of connections that send faster than they are read, before they fill the memory.

libzmq bounds its queues in messages, so an endless message fills them unnoticed. Asking the kernel
for the counts of a thousand connections takes 2 ms; asking for the memory of this process takes 7
us, and to wake up for it ten times that. So memory is checked 40 times a second, more often while
it grows, and the connections when it has grown, and once a second in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable

TICK_MS = 25  # between two checks of memory; at 1 GB/s a flood brings 25 MB in it
HASTE_MS = 5  # while memory grows
GROWING_BYTES = 1 << 20  # from one check to the next
STEP_BYTES = 8 << 20  # growth at which connections are checked
LOOK_S = 1.0  # between two checks of connections when memory does not grow


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; 0 if the system does not report it."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def give_back() -> None:
    """Return free memory that the allocator holds to the system (glibc only)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class FloodWatch:
    """Checks the connections when due; called at the intervals that it returns.

    Args:
        look: checks all connections, cuts those that flood, and returns True if there were any;
            called with the time.
        memory: returns this process's resident bytes.
        clock: monotonic seconds.
        give_back: called once a flood's memory has been freed: millions of small pieces between
            others, of which the allocator would keep a few MB each time.
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
        """Record that a flood was found and ended elsewhere."""
        self._flooded = True

    def tick(self) -> int:
        """Check the connections if memory has grown, or if the last check is old.

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
