"""Whether a worker still gets on with its work, and whether the kernel took it for memory.

Torch-free. What counts is any word of the worker: progress, a question, an answer, or the
sign of life that the doors to images and the backbone give by themselves at every batch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

STEPS = 8  # looks at a worker within the time that it may be silent
LONGEST_STEP_S = 5.0
SLOW_TIMES = 4  # how much longer announced silent work may take: loading weights, say


class Quiet:
    """Sums the time in which a worker said nothing. Pure: it is told how time passes.

    Only time in which this process ran counts. A step that took much longer than planned means
    that the machine slept or that this process was stopped: the worker slept too, or what it
    said waits to be read.

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
        """How long to wait between two calls of `passed`."""
        return min(self._limit_s / STEPS, LONGEST_STEP_S)

    @property
    def allowed_s(self) -> float:
        """How much silence is allowed now."""
        return self._limit_s * (SLOW_TIMES if self.doing else 1)

    def heard(self, doing: str = "") -> None:
        """Note a word of the worker; ``doing`` names silent work that begins with it."""
        self._quiet_s, self.doing = 0.0, doing

    def ours(self, *, ours: bool) -> None:
        """Note that the worker waits for this side (or no more): its silence is not its own."""
        self._quiet_s, self._ours = 0.0, ours

    def passed(self, took_s: float) -> bool:
        """Add a step that took so long; True if the worker has been silent for too long."""
        if not self._ours:
            self._quiet_s += min(took_s, 2 * self.step_s)
        return self._quiet_s >= self.allowed_s


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel killed for lack of memory since it started.

    None where it does not say (other systems, some sandboxes).
    """
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
