"""How much to ask for on one connection: what it was seen to bring, and never much more.

Links differ by a factor of ten thousand, and nobody says beforehand which one it is. What is
asked for and not yet there is the *window*. Each question is timed until its last byte has
come; what came meanwhile, over that time, is the rate, whether bandwidth or delay sets it.
The window is what arrives in 8 seconds at that rate, and at most doubles from one answer to
the next, so one wrong guess does not flood a slow link. A message is what arrives in 2
seconds, so that a lost connection costs little and heartbeats find gaps.

Pure: the time is an argument, in seconds of a clock that does not jump.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 8.0  # several round trips on any link that people use
SPAN_S = 2.0
MIN_WINDOW_BYTES = 128 << 10
MAX_WINDOW_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20  # in flight to or from all clients of a server: what its memory may hold
MAX_SPAN_BYTES = 256 << 10  # x 256 messages: 64 MiB for a peer that asks and does not read
SPANS = 4  # messages in a window at least: while one is checked, others travel
PATIENCE_S = 60.0  # nothing came for so long, though the connection lives: it was lost on the way
_SHORTEST_S = 1e-3  # of a question: below, clocks and not links are measured


def share(most_bytes: int, clients: int) -> int:
    """Return the window that one of several clients may have, at most ``most_bytes``."""
    return max(MIN_WINDOW_BYTES, min(most_bytes, TOTAL_BYTES // max(clients, 1)))


@dataclass(frozen=True)
class _Question:
    """What was asked at one time.

    Attributes:
        upto: number of bytes that were asked for since the beginning, with these.
        at: when.
        arrived: bytes that had come by then.
        full: the window was in use: the answer shows what the link can do.
        unasked: the sender began by itself, some time before.
    """

    upto: int
    at: float
    arrived: int
    full: bool
    unasked: bool


class Pace:
    """The rate of one connection in one direction, and what follows from it.

    Args:
        most_bytes: largest window; may be changed at any time.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rate = 0.0  # bytes per second; 0: not known
        self._target = MIN_WINDOW_BYTES
        self._asked = 0
        self._arrived = 0
        self._questions: deque[_Question] = deque()
        self._news = 0.0  # when something last came, or was asked while nothing was in flight

    @property
    def rate(self) -> float:
        """Bytes per second, as last measured; 0 while it is not known."""
        return self._rate

    @property
    def window_bytes(self) -> int:
        """How much may be in flight."""
        return min(self._target, self.most_bytes)

    @property
    def span_bytes(self) -> int:
        """How large a message should be."""
        return int(min(self._rate * SPAN_S, self.window_bytes / SPANS, MAX_SPAN_BYTES))

    @property
    def in_flight(self) -> int:
        """Bytes that were asked for and have not come."""
        return self._asked - self._arrived

    @property
    def free_bytes(self) -> int:
        """How much to ask for now: nothing before half of the window has come."""
        window = self.window_bytes
        return window - self.in_flight if self.in_flight <= window // 2 else 0

    def asked(self, size: int, now: float, *, unasked: bool = False) -> None:
        """Note a question for so many bytes, or that so many come unasked."""
        if not self.in_flight:
            self._news = now
        self._asked += size
        full = self.in_flight > self.window_bytes // 2
        self._questions.append(_Question(self._asked, now, self._arrived, full, unasked))

    def arrived(self, size: int, now: float) -> None:
        """Note bytes that had been asked for; connections keep the order of answers."""
        self._arrived += size
        self._news = now
        while self._questions and self._questions[0].upto <= self._arrived:
            self._learn(self._questions.popleft(), now)

    def _learn(self, question: _Question, now: float) -> None:
        if question.unasked and not question.full:
            return  # a few bytes that came together with the header
        took = max(now - question.at, _SHORTEST_S)
        rate = (self._arrived - question.arrived) / took
        if rate > self._rate:
            self._rate = rate
        elif question.full:  # a small question takes its time on any link
            self._rate = min((self._rate + rate) / 2, 2 * rate)
        fitting = int(self._rate * WINDOW_S)
        self._target = max(MIN_WINDOW_BYTES, min(fitting, 2 * self._target))
        self._target = min(self._target, max(self.most_bytes, MIN_WINDOW_BYTES))

    def dropped(self, size: int) -> None:
        """Note that bytes which were asked for are not waited for any more."""
        self._asked -= size
        self._questions.clear()

    def stalled(self, now: float) -> bool:
        """Say whether what is in flight was lost: nothing came for `PATIENCE_S`."""
        return self.in_flight > 0 and now - self._news >= PATIENCE_S

    def begin_anew(self) -> None:
        """Count nothing as in flight, and be careful again."""
        self._asked = self._arrived = 0
        self._questions.clear()
        self._rate, self._target = 0.0, MIN_WINDOW_BYTES
