"""Who passes the gate: members, and a few guests who may say one thing.

A guest holds a ticket, or was a member once. A ticket's holder may ask to be enrolled; who
was revoked or has expired is told so. Everybody else gets a number from the gate and no word.

Newcomers and former members have buckets of their own: however many former members knock, and
however often, a ticket that nobody has used yet finds the gate open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fcil_protocol.link.interface import ComeAgain
from fcil_protocol.link.zmq_link import MEMBER_BYTES

MAX_GUEST_BYTES = 8192  # of one message of a guest
GUEST_BYTES = 16 << 10  # that may lie unread of a guest: what it may say, and slack
NEWCOMERS_BURST, NEWCOMERS_PER_S = 20, 2.0  # handshakes of tickets' holders: at once, then so many
FORMER_BURST, FORMER_PER_S = 10, 1.0  # of former members, and of tickets that are good no more
# Between two handshakes with one key. A ticket's holder may need several (an answer that was
# lost, `doctor` before `join`), each time after twice as long, so that one leaves room for others.
FIRST_S, LONGEST_S = 1.0, 60.0
MAX_SEEN = 10_000  # keys whose last handshake is remembered
USED_S = 600.0  # for so long a ticket that was used is as good at the gate: its answer may be lost


@dataclass
class _Bucket:
    """Handshakes of one sort of guests."""

    burst: int
    per_s: float
    first_s: float
    left: float
    at: float
    seen: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # key -> last, then wait

    def take(self, key: bytes, now: float) -> None:
        """Let a key pass.

        Raises:
            ComeAgain: it was here a moment ago, or too many were.
        """
        last, wait = self.seen.get(key, (now, 0.0))
        if now < last + wait:
            raise ComeAgain
        self.left = min(float(self.burst), self.left + (now - self.at) * self.per_s)
        self.at = now
        if self.left < 1:
            raise ComeAgain
        self.left -= 1
        if len(self.seen) >= MAX_SEEN:
            self._forget_old(now)
        # Who stays away for as long as the longest wait begins anew.
        fresh = wait == 0 or now >= last + wait + LONGEST_S
        self.seen[key] = now, self.first_s if fresh else min(LONGEST_S, 2 * wait)

    def _forget_old(self, now: float) -> None:
        """Forget whose wait is over; if that is nobody's, everybody's."""
        self.seen = {k: (at, wait) for k, (at, wait) in self.seen.items() if now < at + wait}
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()


class Doorkeeper:
    """Answers the gate, from the gate's own thread; the daemon changes the lists.

    Lists are replaced, never changed, so a handshake sees the old one or the new one.

    Args:
        clock: seconds that do not jump.
        credit: the largest window, in bytes: a member may have been asked for so much.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, credit: int = 0) -> None:
        self._member_bytes = MEMBER_BYTES + credit
        self._members: frozenset[bytes] = frozenset()
        self._newcomers: dict[bytes, float] = {}  # until when each counts as one
        self._former: frozenset[bytes] = frozenset()
        self._clock = clock
        now = clock()
        self._room = _Bucket(NEWCOMERS_BURST, NEWCOMERS_PER_S, FIRST_S, NEWCOMERS_BURST, now)
        self._corner = _Bucket(FORMER_BURST, FORMER_PER_S, LONGEST_S, FORMER_BURST, now)

    def __call__(self, key: bytes) -> bool:
        """Say whether a handshake with this CURVE key passes; asked by one thread only.

        Raises:
            ComeAgain: a guest's may pass, but not now.
        """
        if key in self._members:
            return True
        now, until = self._clock(), self._newcomers.get(key)
        if until is None and key not in self._former:
            return False
        bucket = self._room if until is not None and now < until else self._corner
        bucket.take(key, now)
        return True

    def allow(self, key: bytes) -> int:
        """Return how many bytes of somebody may lie unread: little of a guest."""
        return self._member_bytes if key in self._members else GUEST_BYTES

    def is_member(self, key: bytes) -> bool:
        """Say whether a key is on the allow-list."""
        return key in self._members

    def admit(self, key: bytes) -> None:
        """Make a key a member's, from its next handshake on."""
        self._members |= {key}
        self._drop_guest(key)

    def replace(
        self, members: Iterable[bytes], newcomers: Mapping[bytes, float], former: Iterable[bytes]
    ) -> None:
        """Let in these and nobody else, from the next handshake on.

        Args:
            members: keys that always pass.
            newcomers: keys of tickets, and for how many seconds each is good.
            former: keys of those who are told why they are no members.
        """
        now = self._clock()
        self._members, self._former = frozenset(members), frozenset(former)
        self._newcomers = {key: now + lasts_s for key, lasts_s in newcomers.items()}

    def invite(self, key: bytes, lasts_s: float) -> None:
        """Let in the holder of a ticket that is good for so long, from its next handshake on."""
        self._newcomers = {**self._newcomers, key: self._clock() + lasts_s}
        self._members -= {key}
        self._former |= {key}  # and when it is over, it hears so

    def used(self, key: bytes) -> None:
        """A ticket was used: for a while its holder may come for an answer that was lost."""
        self.invite(key, USED_S)

    def explain(self, key: bytes) -> None:
        """Let a key in now and then, to hear why it is no member's; from its next handshake on."""
        self._drop_guest(key)
        self._former |= {key}
        self._members -= {key}

    def forget(self, key: bytes) -> None:
        """Make a key nobody's: it does not pass any more."""
        self._members -= {key}
        self._drop_guest(key)

    def _drop_guest(self, key: bytes) -> None:
        self._former -= {key}
        if key in self._newcomers:
            self._newcomers = {k: until for k, until in self._newcomers.items() if k != key}
