"""Allow-list of the gate: members, and a few guests who may send one message.

A guest holds a ticket, or was a member once. A ticket's holder may ask to be enrolled; a revoked or
expired member gets the reason. All others get only a status number from the gate.

Newcomers and former members have separate buckets: however many former members knock, and however
often, the holder of an unused ticket finds the gate open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fcil_protocol.envelopes.window import MIN_WINDOW_BYTES, TOTAL_BYTES
from fcil_protocol.link.interface import ComeAgain
from fcil_protocol.link.zmq_link import MEMBER_BYTES
from fcil_protocol.process.token_bucket import TokenBucket

MAX_GUEST_BYTES = 8192  # of one message of a guest
GUEST_BYTES = 16 << 10  # unread bytes allowed per guest: its one message, and slack
NEWCOMERS_BURST, NEWCOMERS_PER_S = 20, 2.0  # handshakes of tickets' holders: burst, then per second
FORMER_BURST, FORMER_PER_S = 10, 1.0  # of former members, and of tickets that are no longer good
# Pause between two handshakes with one key. A ticket's holder may need several (a lost answer,
# `doctor` before `join`), each after twice as long, so that one leaves room for others.
FIRST_S, LONGEST_S = 1.0, 60.0
MAX_SEEN = 10_000  # keys with a remembered last handshake
MAX_BEHIND = 4_000  # members behind one relay, directly or through others
RELAY_BYTES = max(TOTAL_BYTES, MIN_WINDOW_BYTES * MAX_BEHIND)  # of unread bytes: all their windows
USED_S = 600.0  # for this long the gate accepts a used ticket: its answer may be lost

Watch = Callable[..., None]
Lists = tuple[Sequence[bytes], Mapping[bytes, float], Sequence[bytes], Sequence[bytes]]


@dataclass
class _GuestHandshakes:
    """Handshakes of one kind of guests: few at a time, and each key after a wait."""

    bucket: TokenBucket
    first_s: float
    seen: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # key -> last, then wait

    def take(self, key: bytes, now: float) -> None:
        """Admit a key.

        Raises:
            ComeAgain: it was here a moment ago, or too many were.
        """
        last, wait = self.seen.get(key, (now, 0.0))
        if now < last + wait:
            raise ComeAgain
        if not self.bucket.draw(now):
            raise ComeAgain
        if len(self.seen) >= MAX_SEEN:
            self._forget_old(now)
        # A key that stays away for as long as the longest wait starts from scratch.
        fresh = wait == 0 or now >= last + wait + LONGEST_S
        self.seen[key] = now, self.first_s if fresh else min(LONGEST_S, 2 * wait)

    def _forget_old(self, now: float) -> None:
        """Forget keys whose wait is over; if there is none, all keys."""
        self.seen = {k: (at, wait) for k, (at, wait) in self.seen.items() if now < at + wait}
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()


class AllowList:
    """The gate's allow-list, asked from the gate's own thread and changed by the daemon.

    Lists are replaced, never changed, so a handshake sees the old one or the new one. Gates in
    other processes have lists of their own, which are changed in the same way (`watch`).

    Args:
        clock: seconds that do not jump.
        credit: the largest window, in bytes: this many may be on their way from a member.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, credit: int = 0) -> None:
        self._member_bytes = MEMBER_BYTES + credit
        self._members: frozenset[bytes] = frozenset()
        self._relays: frozenset[bytes] = frozenset()
        self._newcomers: dict[bytes, float] = {}  # end of each one's time as a newcomer
        self._former: frozenset[bytes] = frozenset()
        self._clock = clock
        self._watch: Watch | None = None
        now = clock()
        newcomers = TokenBucket(NEWCOMERS_BURST, NEWCOMERS_PER_S, NEWCOMERS_BURST, now)
        self._room = _GuestHandshakes(newcomers, FIRST_S)
        former = TokenBucket(FORMER_BURST, FORMER_PER_S, FORMER_BURST, now)
        self._corner = _GuestHandshakes(former, LONGEST_S)

    def watch(self, watch: Watch | None) -> None:
        """Call this at every change from now on, with the arguments of `repeat`."""
        self._watch = watch

    def repeat(self, change: str, *arguments: Any) -> None:
        """Make a change of another list, as its `watch` gets it."""
        changes: dict[str, Callable[..., None]] = {
            "admit": self.admit,
            "replace": self.replace,
            "invite": self.invite,
            "explain": self.explain,
            "forget": self.forget,
        }
        changes[change](*arguments)

    def lists(self) -> Lists:
        """Return the arguments of a `replace` that makes another list the same as this one."""
        now = self._clock()
        left = {key: until - now for key, until in self._newcomers.items() if until > now}
        return [*self._members], left, [*self._former], [*self._relays]

    def _changed(self, name: str, *arguments: Any) -> None:
        if self._watch is not None:
            self._watch(name, *arguments)

    def __call__(self, key: bytes) -> bool:
        """Return True if a handshake with this CURVE key passes; called by one thread only.

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
        """Return the number of unread bytes allowed for a key: few for a guest."""
        if key not in self._members:
            return GUEST_BYTES
        return self._member_bytes + RELAY_BYTES * (key in self._relays)

    def is_member(self, key: bytes) -> bool:
        """Return True if a key is on the allow-list."""
        return key in self._members

    def admit(self, key: bytes) -> None:
        """Make a key a member's, from its next handshake on."""
        self._members |= {key}
        self._drop_guest(key)
        self._changed("admit", key)

    def replace(
        self,
        members: Iterable[bytes],
        newcomers: Mapping[bytes, float],
        former: Iterable[bytes],
        relays: Iterable[bytes] = (),
    ) -> None:
        """Admit these keys and no others, from the next handshake on.

        Args:
            members: keys that always pass.
            newcomers: keys of tickets, and for how many seconds each is good.
            former: keys of former members, which get the reason.
            relays: those of the members that are relays, and send for many.
        """
        now = self._clock()
        self._members, self._former = frozenset(members), frozenset(former)
        self._relays = frozenset(relays)
        self._newcomers = {key: now + lasts_s for key, lasts_s in newcomers.items()}
        self._changed("replace", *self.lists())

    def invite(self, key: bytes, lasts_s: float) -> None:
        """Admit the holder of a ticket for ``lasts_s`` seconds, from its next handshake on."""
        now = self._clock()
        open_ones = {k: until for k, until in self._newcomers.items() if until > now}
        self._newcomers = {**open_ones, key: now + lasts_s}
        self._members -= {key}
        self._former |= {key}  # after that time, it gets the reason
        self._changed("invite", key, lasts_s)

    def used(self, key: bytes) -> None:
        """Admit the holder of a used ticket for a while, in case its answer was lost."""
        self.invite(key, USED_S)

    def explain(self, key: bytes) -> None:
        """Admit a key occasionally from now on, to get the reason why it is no member's."""
        self._drop_guest(key)
        self._former |= {key}
        self._members -= {key}
        self._changed("explain", key)

    def forget(self, key: bytes) -> None:
        """Remove a key: it no longer passes."""
        self._members -= {key}
        self._drop_guest(key)
        self._changed("forget", key)

    def _drop_guest(self, key: bytes) -> None:
        self._former -= {key}
        if key in self._newcomers:
            self._newcomers = {k: until for k, until in self._newcomers.items() if k != key}
