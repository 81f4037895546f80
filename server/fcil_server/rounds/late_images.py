"""Late images: which clients may have some, and when a round asks for them.

A late image is one of a learned class that no update of its client counts. Methods whose state is a
sum over images can count it when it comes (docs/decisions/0086).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.late_images import classes_of
from fcil_protocol.errors import EgressRefused, MethodMismatch, NothingLeft, NotNow, PrivacyRefused
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.payloads.builtin import LATE
from fcil_server.ledger.enums import SPLIT_SUM, Answer, UpdateStatus
from fcil_server.rounds.position import RunContext
from fcil_server.sessions.peers import Peer

# A client that declines for one of these reasons would decline again.
_FINAL = frozenset(e.code for e in (NothingLeft, PrivacyRefused, EgressRefused, MethodMismatch))
# While the run waits for classes: after the server's start, other clients may connect meanwhile.
_FIRST_S = 10.0
_MOST_BACKOFF = 6  # times four: with rounds every ten minutes, a month


class _Backoff(NamedTuple):
    """A client that was asked and sent nothing: what it had, how often, and how long it rests."""

    held: dict[str, int]
    times: int
    until: float


@dataclass
class LateImages:
    """Chooses the clients to ask for late images, and the time of the rounds.

    The server does not see which images an update counts. It remembers how many of each class a
    client announced when it was last asked for that class: other numbers may mean late images, and
    the client knows. It does not remember across a restart, after which each client is asked once.
    A client that declines or stays silent is left alone four times as long each time, unless its
    numbers change: it would have the others compute, and with noise pay, for rounds that too few
    join. One that rests is left alone until it says that it is ready.
    """

    context: RunContext
    _settled: dict[ClientId, dict[str, int]] = field(default_factory=dict)
    _asked: dict[ClientId, dict[str, int]] = field(default_factory=dict)  # in the open round
    _backoff: dict[ClientId, _Backoff] = field(default_factory=dict)
    _keys: frozenset[str] = frozenset()  # of the open round's classes, if it counts images once
    _next_at: float | None = None  # no round before, while the run waits for classes

    def clients(self, task: TaskInfo, peers: Iterable[Peer], now: float) -> frozenset[ClientId]:
        """Return those of the connected clients that may have late images of the classes so far.

        A client whose updates a fork took over has none: it has forgotten which of its images they
        count. A client that was forgotten is not asked either.

        Args:
            task: the newest one.
            peers: the clients.
            now: seconds of the server's uptime.
        """
        keys = self.context.classes.keys_of(task.seen)
        found = []
        for peer in peers:
            known = self._settled.get(peer.client, {})
            held = _held(peer, keys)
            late = any(known.get(key) != n for key, n in held.items())
            rest = self._backoff.get(peer.client)
            left_alone = rest is not None and now < rest.until and rest.held == held
            if late and not left_alone and peer.client not in self._apart:
                found.append(peer.client)
        return frozenset(found)

    @cached_property
    def _apart(self) -> frozenset[ClientId]:
        """The clients that are never asked."""
        updates, run = self.context.ledger.updates, self.context.run
        return updates.inherited_from(run) | {client for client, _ in self.context.forgotten}

    def suffice(self, task: TaskInfo, now: float) -> bool:
        """Return True if enough clients may have late images for a round to change anything."""
        late = self.clients(task, self.context.peers.announced(), now)
        return len(late) >= max(self.context.config.least_updates, 1)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next round while the run waits for classes; 0: now."""
        every_s = self.context.config.round.late_every_s
        if self._next_at is None:
            self._next_at = now + min(_FIRST_S, every_s)
        return max(0.0, self._next_at - now)

    def begin(self, task: TaskInfo, kind: str) -> None:
        """Note that a round begins, or goes on after a restart.

        Args:
            task: the round's.
            kind: the round's.
        """
        exchange = self.context.exchange(kind)
        once = exchange is not None and exchange.counts_once
        self._keys = self.context.classes.keys_of(classes_of(kind, task)) if once else frozenset()
        self._asked.clear()

    def ask(self, peer: Peer) -> None:
        """Note what a client has announced of the round's classes when it is first asked.

        Later images may have come while it was at work, and other names of classes: they are none
        of those that it was asked for.
        """
        if self._keys:
            self._asked.setdefault(peer.client, _held(peer, self._keys))

    def close(self, key: RoundKey, now: float) -> dict[ClientId, int]:
        """Note the end of a round that counts images once.

        Args:
            key: the round, which the ledger has closed.
            now: seconds of the server's uptime.

        Returns:
            The number of images that it counted, by client.
        """
        ledger = self.context.ledger
        row, updates = ledger.rounds.get(key), ledger.updates.of_round(key)
        counted = {u.client: u.samples for u in updates if u.status is UpdateStatus.COUNTED}
        # An update that was not counted among others would be left out again.
        sent = (
            [u.client for u in updates if u.reason != SPLIT_SUM]
            if row is not None and row.new_state is not None
            else counted
        )
        answers = (Answer.DECLINED, Answer.STRAGGLER)
        failed = {a.client: a.reason for a in ledger.answers.of_round(key) if a.answer in answers}
        nothing = [client for client, reason in failed.items() if reason in _FINAL]
        for client in (*sent, *nothing):
            self._settled.setdefault(client, {}).update(self._asked.get(client, {}))
        if key.kind == LATE:
            self._next_at = now + self.context.config.round.late_every_s
            for client in {*(u.client for u in updates), *nothing}:
                self._backoff.pop(client, None)
            for client in failed.keys() - set(nothing):
                held = self._asked.get(client, {})
                self._leave_alone(client, held, now, rests=failed[client] == NotNow.code)
        self._asked.clear()
        return counted

    def _leave_alone(
        self, client: ClientId, held: dict[str, int], now: float, *, rests: bool
    ) -> None:
        before = self._backoff.get(client)
        times = before.times if before is not None and before.held == held else 0
        times = times if rests else min(times + 1, _MOST_BACKOFF)
        wait_s = math.inf if rests else self.context.config.round.late_every_s * 4**times
        self._backoff[client] = _Backoff(held, times, now + wait_s)

    def on_ready(self, client: ClientId) -> None:
        """Note that a client has announced its classes: if it rested, it does no more."""
        before = self._backoff.get(client)
        if before is not None and before.until == math.inf:
            self._backoff[client] = before._replace(until=0.0)

    def left_alone_s(self, now: float) -> float:
        """Return the seconds until a client that was left alone may be asked again; 0: never."""
        ends = [b.until - now for b in self._backoff.values() if now < b.until < math.inf]
        return min(ends, default=0.0)


def _held(peer: Peer, keys: Collection[str]) -> dict[str, int]:
    """Return a client's number of images by class key, for these keys."""
    return {key: n for key, n in (peer.train or {}).items() if n and key in keys}
