"""Flow control of one connection: the window follows the measured rate of the link.

Links differ by a factor of ten thousand, and the rate of a link is unknown beforehand. The bytes
that are requested and not yet received are the *window*. Each request is timed until its last byte
has arrived; the bytes that arrived meanwhile, over that time, are the rate, limited by bandwidth or
by delay. The window holds 8 seconds at that rate, and at most doubles from one answer to the next,
so one wrong estimate does not flood a slow link. A message holds 2 seconds at that rate, so that a
lost connection costs little and heartbeats find gaps.

Pure: the time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 8.0  # several round trips on any link in use
SPAN_S = 2.0
MIN_WINDOW_BYTES = 128 << 10
MAX_WINDOW_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20  # in flight to all clients of a server, and unread from all of a relay
# Asked for by a server, of all clients that send at a time: with three or more a link of 1 Gbit/s
# stays busy at round trips of half a second. What comes faster than it is taken waits in memory.
ASKED_BYTES = 64 << 20
MAX_SPAN_BYTES = 256 << 10  # x 256 messages: 64 MiB for a peer that requests and does not read
SPANS = 4  # fewest messages in a window: while one is verified, others travel
LOSS_TIMEOUT_S = 60.0  # without data on a live connection: then requested data counts as lost
_SHORTEST_S = 1e-3  # of a request: shorter times measure clocks, not links


def share(most_bytes: int, clients: int, total_bytes: int) -> int:
    """Return the window of one of several clients, at most ``most_bytes``; never below the least.

    Args:
        most_bytes: of one.
        clients: that share ``total_bytes``.
        total_bytes: `TOTAL_BYTES` or `ASKED_BYTES`.
    """
    return max(MIN_WINDOW_BYTES, min(most_bytes, total_bytes // max(clients, 1)))


@dataclass(frozen=True)
class _Question:
    """One request for data.

    Attributes:
        upto: total bytes requested since the beginning, including these.
        at: time of the request.
        arrived: total bytes that had arrived by then.
        full: the window was in use: the answer shows the capacity of the link.
        unasked: the sender began without a request, some time before.
    """

    upto: int
    at: float
    arrived: int
    full: bool
    unasked: bool


class Pace:
    """The rate of one connection in one direction, and the window that follows from it.

    Args:
        most_bytes: largest window; may be changed at any time.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rate = 0.0  # bytes per second; 0: unknown
        self._target = MIN_WINDOW_BYTES
        self._asked = 0
        self._arrived = 0
        self._questions: deque[_Question] = deque()
        self._news = 0.0  # time of the last arrival, or of a request while nothing was in flight

    @property
    def rate(self) -> float:
        """Bytes per second, as last measured; 0 while unknown."""
        return self._rate

    @property
    def window_bytes(self) -> int:
        """Largest number of bytes in flight."""
        return min(self._target, self.most_bytes)

    @property
    def span_bytes(self) -> int:
        """Size of a message in bytes."""
        return int(min(self._rate * SPAN_S, self.window_bytes / SPANS, MAX_SPAN_BYTES))

    @property
    def in_flight(self) -> int:
        """Bytes that were requested and have not arrived."""
        return self._asked - self._arrived

    @property
    def free_bytes(self) -> int:
        """Bytes to request now: 0 until half of the window has arrived."""
        window = self.window_bytes
        return window - self.in_flight if self.in_flight <= window // 2 else 0

    def asked(self, size: int, now: float, *, unasked: bool = False) -> None:
        """Record a request for this many bytes, or that they arrive without one."""
        if not self.in_flight:
            self._news = now
        self._asked += size
        full = self.in_flight > self.window_bytes // 2
        self._questions.append(_Question(self._asked, now, self._arrived, full, unasked))

    def arrived(self, size: int, now: float) -> None:
        """Record the arrival of requested bytes; connections keep the order of answers."""
        self._arrived += size
        self._news = now
        while self._questions and self._questions[0].upto <= self._arrived:
            self._learn(self._questions.popleft(), now)

    def _learn(self, question: _Question, now: float) -> None:
        if question.unasked and not question.full:
            return  # a few bytes that arrived together with the header
        took = max(now - question.at, _SHORTEST_S)
        rate = (self._arrived - question.arrived) / took
        if rate > self._rate:
            self._rate = rate
        elif question.full:  # a small request takes its time on any link
            self._rate = min((self._rate + rate) / 2, 2 * rate)
        fitting = int(self._rate * WINDOW_S)
        self._target = max(MIN_WINDOW_BYTES, min(fitting, 2 * self._target))
        self._target = min(self._target, max(self.most_bytes, MIN_WINDOW_BYTES))

    def dropped(self, size: int) -> None:
        """Record that these requested bytes are no longer expected."""
        self._asked -= size
        self._questions.clear()

    def idle_s(self, now: float) -> float:
        """Return for how long nothing has arrived, while something was requested."""
        return now - self._news if self.in_flight > 0 else 0.0

    def stalled(self, now: float) -> bool:
        """Return True if the bytes in flight were lost: no data arrived for `LOSS_TIMEOUT_S`."""
        return self.idle_s(now) >= LOSS_TIMEOUT_S

    def begin_anew(self) -> None:
        """Count no bytes as in flight, and start from the smallest window."""
        self._asked = self._arrived = 0
        self._questions.clear()
        self._rate, self._target = 0.0, MIN_WINDOW_BYTES
