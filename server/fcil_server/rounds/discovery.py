"""Discovered classes: the opening of the next task, and returning images of learned classes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fcil_protocol.ids import ClientId
from fcil_server.event_loop import TURN_S
from fcil_server.ledger.rows import ClassRow
from fcil_server.rounds.position import RunContext
from fcil_server.sessions.peers import Peer

NAMED = 8  # classes that a note lists
# A look at thousands of clients rests this many times as long as it took: those that connect
# meanwhile are one piece of news.
REST = 9


@dataclass
class Discovery:
    """Waits until enough new class names are there and have settled.

    Attributes:
        waits: receives a phrase that names what the next task waits for.
        before_wait: called before each wait; returns when the operator lets the run continue and no
            round of late images is due.
        news: set whenever a client has announced its classes or left, or names were changed.
    """

    context: RunContext
    waits: Callable[[str], None]
    before_wait: Callable[[], Awaitable[None]]
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
        keys: frozenset[str] = frozenset()
        ready = False
        # When the first name came; and when the last one did, or the last client that was missing.
        first = changed = now()
        while True:
            await self.before_wait()
            began = time.thread_time()
            before, keys, here = keys, self.held_class_keys(), len(self.context.peers.announced())
            took_s = time.thread_time() - began
            was_ready, ready = ready, len(keys) >= rules.min_new_classes and here >= least
            if keys != before or ready > was_ready:
                changed = now()
                first = first if before else changed
            moments = []  # at which a task may open if there is no news
            if ready:
                moments.append(changed + rules.settle_s)
            if len(keys) >= self.context.fewest_classes and here:
                moments.append(first + rules.max_wait_s)
            if moments and now() >= min(moments):
                return
            self.waits(self._wish(len(keys), here))
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                wait_s = min(moments) - now() if moments else None
                await asyncio.wait_for(self.news.wait(), wait_s)
            if took_s > TURN_S:
                await asyncio.sleep(REST * took_s)

    def _wish(self, pending: int, here: int) -> str:
        rules, least = self.context.config.tasks, self.context.config.round.min_clients
        asked = len(self.context.classes.awaiting_admission())
        more = f"; {asked} to be admitted: fcil-server classes admit" if asked else ""
        return (
            f"{least} client{'s' if least > 1 else ''} ({here} ready) and at least "
            f"{rules.min_new_classes} new class{'es' if rules.min_new_classes > 1 else ''} in all "
            f"({pending} waiting{more})"
        )


@dataclass
class OldClasses:
    """Notices clients that bring images of classes that earlier tasks have learned.

    Such images are tested and not trained (docs/decisions/0015), unless the method counts them late
    (`late_images`): the client learns it with its next round, the operator here.
    """

    context: RunContext
    _counts: dict[ClientId, Mapping[str, int]] = field(default_factory=dict)

    def notice(self, peer: Peer) -> None:
        """Report learned classes of which a client brings images for the first time, or more."""
        counts = peer.train or {}
        before = self._counts.get(peer.client)
        self._counts[peer.client] = dict(counts)
        learned = self._learned(counts)
        taught = self.context.ledger.updates.counted_tasks_of
        took_part = taught(self.context.run, peer.client) if learned else set()
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

    def _say(self, peer: Peer, what: str, rows: list[ClassRow]) -> None:
        names = ", ".join(f"{r.name} (task {r.task})" for r in rows[:NAMED])
        rest = f" and {len(rows) - NAMED} more classes" if len(rows) > NAMED else ""
        late = self.context.counts_late
        end = "counted between rounds" if late else "not trained again"
        text = f"{peer.name} brings {what} of {names}{rest}: learned before, {end}"
        self.context.notify("info", "learned_before", text)
