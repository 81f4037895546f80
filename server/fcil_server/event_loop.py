"""The event loop's time: how late it comes to what is due, and turns in long work.

Heartbeats, timers and other clients wait while one piece of work has the loop. So work of many
steps gives the others a turn every few milliseconds, and what waits for a disk or ciphers much
runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

TURN_S = 0.002  # longest that work of many steps keeps the loop; one step may take longer
TICK_S = 0.02  # between looks at the clock: 50 a second cost 0.2 % of a core
_BUCKETS = 1000  # of a millisecond each; the last one has all that is later
_MOST_TICKS = 10_000  # a process that was stopped for an hour has one late tick, not 180,000


class Turns:
    """Asked between the steps of long work, it lets others have their turn when it is time."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def give(self) -> None:
        """Go on at once, or after the others if the loop has been kept for long enough."""
        if time.monotonic() - self._since >= TURN_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()


@dataclass(frozen=True)
class Lag:
    """How late the loop was over a stretch of time, in seconds.

    Attributes:
        max_s: at most.
        p99_s: 99 of 100 moments at which something could have been due waited no longer.
    """

    max_s: float = 0.0
    p99_s: float = 0.0

    def to_fields(self) -> dict[str, float]:
        """Return it as the ledger and the status show it."""
        return {"loop_lag_max_s": round(self.max_s, 4), "loop_lag_p99_s": round(self.p99_s, 4)}


class LagMeter:
    """A timer that fires every `TICK_S`, and counts how late.

    A loop that is kept for a second misses 50 ticks, and all of them count, each as late as it
    was noticed: else the worst second would weigh no more than a good hundredth.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._max_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_at(self._due, self._fire, loop)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count(loop.time())
        self._timer = loop.call_at(self._due, self._fire, loop)

    def count(self, now: float) -> None:
        """Count every tick that was due until now, by how late it is."""
        self._max_s = max(self._max_s, now - self._due)
        self._due = max(self._due, now - _MOST_TICKS * TICK_S)
        while self._due <= now:
            late_ms = int((now - self._due) * 1000)
            self._counts[min(late_ms, _BUCKETS - 1)] += 1
            self._due += TICK_S

    @property
    def lag(self) -> Lag:
        """What was seen since the last `take`."""
        wanted = sum(self._counts) * 0.99
        for bucket, count in enumerate(self._counts):
            wanted -= count
            if wanted <= 0:
                return Lag(self._max_s, min((bucket + 1) / 1000, self._max_s))
        raise AssertionError("the counts add up to more than 99 % of themselves")

    def take(self) -> Lag:
        """Return what was seen since the last call, and begin anew."""
        lag = self.lag
        self._counts, self._max_s = [0] * _BUCKETS, 0.0
        return lag
