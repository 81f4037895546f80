"""Watchdog over a worker's progress, and the kernel's count of processes it killed for memory.

Torch-free. Every message of the worker counts: progress, a question, an answer, or the sign of life
that datasets and the backbone give by themselves at every batch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

STEPS = 8  # checks of a worker within its longest allowed silence
LONGEST_STEP_S = 5.0
SLOW_TIMES = 4  # factor for announced silent work: loading weights, say


class StallTimer:
    """Sum of a worker's silent time. Pure: it has no clock of its own.

    Only time in which this process ran counts. A step that took much longer than planned means that
    the machine slept or that this process was stopped: the worker slept too, or its message waits
    to be read.

    Attributes:
        doing: the silent work that the worker announced; empty: none.
    """

    def __init__(self, limit_s: float) -> None:
        """Allow ``limit_s`` seconds of silence."""
        self.doing = ""
        self._limit_s = limit_s
        self._quiet_s = 0.0
        self._ours = False

    @property
    def step_s(self) -> float:
        """Seconds to wait between two calls of `passed`."""
        return min(self._limit_s / STEPS, LONGEST_STEP_S)

    @property
    def allowed_s(self) -> float:
        """Seconds of silence that are allowed now."""
        return self._limit_s * (SLOW_TIMES if self.doing else 1)

    def heard(self, doing: str = "") -> None:
        """Note a message of the worker; ``doing`` names silent work that begins with it."""
        self._quiet_s, self.doing = 0.0, doing

    def mark_waiting(self, *, ours: bool) -> None:
        """Note that the worker waits for this side (or no more): its silence is not its own."""
        self._quiet_s, self._ours = 0.0, ours

    def passed(self, took_s: float) -> bool:
        """Add a step of ``took_s`` seconds; return True if the silence is now too long."""
        if not self._ours:
            self._quiet_s += min(took_s, 2 * self.step_s)
        return self._quiet_s >= self.allowed_s


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory since boot.

    None where the kernel does not count them (other systems, some sandboxes).
    """
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
