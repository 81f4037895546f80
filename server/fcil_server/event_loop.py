"""The event loop's time: the lateness of its timers, and turns in long work.

Heartbeats, timers and other clients wait while one piece of work occupies the loop. So work of many
steps gives the others a turn every few milliseconds, and work that waits for a disk or encrypts
much runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

TURN_S = 0.002  # longest that work of many steps keeps the loop; one step may take longer
TICK_S = 0.02  # between looks at the clock: 50 a second cost 0.2 % of a core
_BUCKETS = 1000  # of a millisecond each; the last one has all later ones
_MOST_TICKS = 10_000  # a process that was stopped for an hour has one late tick, not 180,000


class Yielder:
    """Called between the steps of long work, it gives other tasks their turn when it is time."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def yield_if_long(self) -> None:
        """Return at once, or after other tasks if the loop has been occupied for long enough."""
        if time.monotonic() - self._since >= TURN_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()


@dataclass(frozen=True)
class Lag:
    """Lateness of the loop over a stretch of time, in seconds.

    Attributes:
        max_s: the maximum.
        p99_s: the lateness that 99 of 100 possible due times did not exceed.
    """

    max_s: float = 0.0
    p99_s: float = 0.0

    def to_fields(self) -> dict[str, float]:
        """Return its fields for the ledger and the status."""
        return {"loop_lag_max_s": round(self.max_s, 4), "loop_lag_p99_s": round(self.p99_s, 4)}


class LagMeter:
    """A timer that fires every `TICK_S`, and measures its lateness.

    A loop that is occupied for a second misses 50 ticks, and all of them count, each as late as it
    was noticed: else the worst second would weigh no more than a good hundredth.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._max_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to watch the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_at(self._due, self._fire, loop)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count(loop.time())
        self._timer = loop.call_at(self._due, self._fire, loop)

    def count(self, now: float) -> None:
        """Count every tick that was due until now, by its lateness."""
        self._max_s = max(self._max_s, now - self._due)
        self._due = max(self._due, now - _MOST_TICKS * TICK_S)
        while self._due <= now:
            late_ms = int((now - self._due) * 1000)
            self._counts[min(late_ms, _BUCKETS - 1)] += 1
            self._due += TICK_S

    @property
    def lag(self) -> Lag:
        """The lag since the last `take`."""
        wanted = sum(self._counts) * 0.99
        for bucket, count in enumerate(self._counts):
            wanted -= count
            if wanted <= 0:
                return Lag(self._max_s, min((bucket + 1) / 1000, self._max_s))
        raise AssertionError("the counts add up to more than 99 % of themselves")

    def take(self) -> Lag:
        """Return the lag since the last call, and reset it."""
        lag = self.lag
        self._counts, self._max_s = [0] * _BUCKETS, 0.0
        return lag
