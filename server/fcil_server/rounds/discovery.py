"""Discovered classes: the opening of the next task, and returning images of learned classes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fcil_adapters.contract import TaskInfo
from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.rows import ClassRow
from fcil_server.rounds.position import RunContext
from fcil_server.sessions.peers import Peer

NAMED = 8  # classes that a note lists


@dataclass
class Discovery:
    """Waits until enough new class names are there and have settled.

    Attributes:
        waits: receives a phrase that names what the next task waits for.
        may_go_on: returns at once unless the operator holds the run, or late images are counted
            first.
        news: set whenever a client has announced its classes or left, or names were changed.
    """

    context: RunContext
    waits: Callable[[str], None]
    may_go_on: Callable[[], Awaitable[None]]
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def held_class_keys(self) -> frozenset[str]:
        """Return the keys of new class names that a connected client has images of."""
        brought = {
            k for p in self.context.peers.announced() for k, n in (p.train or {}).items() if n
        }
        held = self.context.classes.canonical(brought)
        return frozenset(c.key for c in self.context.classes.pending() if c.key in held)

    async def wait(self) -> None:
        """Wait until a task may open by the rules of ``[tasks]``."""
        rules, least = self.context.config.tasks, self.context.config.round.min_clients
        now = asyncio.get_running_loop().time
        first: float | None = None
        while True:
            await self.may_go_on()
            pending, here = len(self.held_class_keys()), len(self.context.peers.announced())
            first = (first or now()) if pending else None
            enough = pending >= rules.min_new_classes and here >= least
            overdue = first is not None and now() >= first + rules.max_wait_s
            if pending and here and overdue:
                return
            self.waits(self._wish(pending, here))
            # Overdue and no client connected: only an arrival changes anything.
            limit = None if first is None or not here else first + rules.max_wait_s - now()
            self.news.clear()
            try:
                wait_s = rules.settle_s if enough else limit and max(0.0, limit)
                await asyncio.wait_for(self.news.wait(), wait_s)
            except TimeoutError:
                # The client that brought the classes may have left while they settled.
                if enough and len(self.held_class_keys()) >= rules.min_new_classes:
                    return

    def _wish(self, pending: int, here: int) -> str:
        rules, least = self.context.config.tasks, self.context.config.round.min_clients
        asked = len(self.context.classes.awaiting_admission())
        more = f"; {asked} to be admitted: fcil-server classes admit" if asked else ""
        return (
            f"{least} client{'s' if least > 1 else ''} ({here} ready) and at least "
            f"{rules.min_new_classes} new class{'es' if rules.min_new_classes > 1 else ''} in all "
            f"({pending} waiting{more})"
        )


@dataclass(frozen=True)
class _Settled:
    """A client's images of the classes so far, and the counted ones, when it was last asked."""

    held: Mapping[str, int] = field(default_factory=dict)
    counted: int = 0

    def lacks(self, held: Mapping[str, int], counted: int) -> bool:
        """Return True if a client with these images of the classes so far may have uncounted ones.

        What it had left when it was asked is not asked for again: copies, or too few of a class.
        """
        if any(held.get(k, 0) != n for k, n in self.held.items()):
            return True
        more = sum(n for k, n in held.items() if k not in self.held)
        return more > counted - self.counted


@dataclass
class OldClasses:
    """Notices clients that bring images of classes that earlier tasks have learned.

    Such images are tested and not trained (docs/decisions/0015): the client learns it with its next
    round, the operator here. A method that can count them late does (docs/decisions/0086): then
    this knows which clients to ask.
    """

    context: RunContext
    _counts: dict[ClientId, Mapping[str, int]] = field(default_factory=dict)
    _settled: dict[ClientId, _Settled] = field(default_factory=dict)

    def notice(self, peer: Peer) -> None:
        """Report learned classes of which a client brings images for the first time, or more."""
        counts = peer.train or {}
        before = self._counts.get(peer.client)
        self._counts[peer.client] = dict(counts)
        learned = self._learned(counts)
        took_part = self._took_part(peer.client) if learned else set()
        new, more = [], []
        for key, row in learned.items():
            if before is not None and key in before:
                more += [row] if counts[key] > before[key] else []
            elif row.task not in took_part:
                new.append(row)
        if not self.context.counts_late:
            peer.untrained = tuple(sorted({*peer.untrained, *(r.name for r in (*new, *more))}))
        for what, rows in (("images", new), ("more images", more)):
            if rows:
                self._say(peer, what, rows)

    def late_clients(self, task: TaskInfo) -> frozenset[ClientId]:
        """Return the connected clients that may have uncounted images of the classes so far.

        A client has some if it announces more images than its updates count, or other numbers of a
        class than when it was last asked. One whose updates a fork took over is left out: it has
        forgotten which of its images they count. So is one that was forgotten.
        """
        context = self.context
        counted = self._counted_images()
        apart = context.ledger.updates.inherited_from(context.run)
        apart |= {client for client, _ in context.forgotten}
        keys = context.classes.keys_of(task.seen)
        found = []
        for peer in context.peers.announced():
            held = {k: n for k, n in (peer.train or {}).items() if n and k in keys}
            before = self._settled.get(peer.client, _Settled())
            if (
                held
                and peer.client not in apart
                and before.lacks(held, counted.get(peer.client, 0))
            ):
                found.append(peer.client)
        return frozenset(found)

    def settle(self, task: TaskInfo, clients: Iterable[ClientId]) -> None:
        """Note that these clients have sent what they had, or have said that they have nothing."""
        keys = self.context.classes.keys_of(task.seen)
        counted = self._counted_images()
        for client in clients:
            peer = self.context.peers.by_client(client)
            if peer is not None:
                held = {k: n for k, n in (peer.train or {}).items() if n and k in keys}
                self._settled[client] = _Settled(held, counted.get(client, 0))

    def _counted_images(self) -> dict[ClientId, int]:
        kinds = [e.kind for e in self.context.exchanges if e.once]
        return self.context.ledger.updates.counted_images(self.context.run, kinds)

    def _learned(self, counts: Mapping[str, int]) -> dict[str, ClassRow]:
        """Return the client's class key -> class, for classes whose task is over."""
        over = {
            t.task
            for t in self.context.ledger.tasks.all(self.context.run)
            if t.closed_at is not None
        }
        if not over:
            return {}
        rows = {
            c.key: c for c in self.context.ledger.classes.all(self.context.run) if c.task in over
        }
        aliases = self.context.ledger.classes.aliases(self.context.run)
        held = {k: aliases.get(k, k) for k, n in counts.items() if n}
        return {k: rows[to] for k, to in held.items() if to in rows and not rows[to].hidden}

    def _took_part(self, client: ClientId) -> set[int | None]:
        updates = self.context.ledger.updates.of_client(self.context.run, client)
        return {u.task for u in updates if u.status is UpdateStatus.COUNTED}

    def _say(self, peer: Peer, what: str, rows: list[ClassRow]) -> None:
        names = ", ".join(f"{r.name} (task {r.task})" for r in rows[:NAMED])
        rest = f" and {len(rows) - NAMED} more classes" if len(rows) > NAMED else ""
        late = self.context.counts_late
        end = "counted between rounds" if late else "not trained again"
        text = f"{peer.name} brings {what} of {names}{rest}: learned before, {end}"
        self.context.notify("info", "learned_before", text)
