"""The server's state at one moment, from memory alone: for commands, monitoring, the dashboard.

One process asks for the dashboards once a second, however many are open. Only names of absent
clients are looked up, at most `MAX_SHOWN` of them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_protocol.process.terminal import count_of
from fcil_server.event_loop import Lag, Yielder
from fcil_server.ledger.enums import Answer

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext
    from fcil_server.sessions.peers import Peer
    from fcil_server.sessions.uploads import Accepted

MAX_SHOWN = 60  # clients of the round that are listed one by one
MAX_TOLD_APART = 1000  # clients whose presence a poller may ask for by id
_RANKS = 5
_NOW = ("phase", "mode", "waiting_for", "task", "kind", "round", "rounds", "remaining_s")
_NOT_FOR_POLLERS = ("rounds", "answers", "lag")


@dataclass(frozen=True)
class LiveStatus:
    """The server's state at one moment; field names are those of the answers of commands.

    Attributes:
        started_at: unix seconds.
        waiting_for: what the run waits for, one phrase; empty while busy.
        task, kind, round, rounds: the step under way; None before the first one.
        remaining_s: until the deadline of the round under way.
        answers: of the clients that this round has asked; ``asked`` is their number, ``answered``
            that of the updates.
        connected, ready: clients with a session; those that may be asked.
        lag: of the event loop.
    """

    pid: int
    started_at: float
    run: RunId
    phase: str
    mode: str
    waiting_for: str
    task: int | None
    kind: str | None
    round: int | None
    rounds: int | None
    remaining_s: float | None
    answers: Mapping[ClientId, Answer]
    asked: int
    answered: int
    connected: int
    ready: int
    worker_pid: int | None
    worker_starts: int
    worker_deaths: int
    lag: Lag

    @classmethod
    def of(cls, context: ServerContext) -> Self:
        """Return a server's state."""
        coordinator = context.run.coordinator
        progress, step = coordinator.progress, coordinator.progress.step
        answers = dict(progress.round.answers) if progress.round is not None else {}
        worker = coordinator.context.aggregation.worker
        return cls(
            pid=os.getpid(),
            started_at=context.started_at,
            run=coordinator.context.run,
            phase=progress.phase,
            mode=progress.mode.value,
            waiting_for=progress.waiting_for,
            task=progress.task.index if progress.task else None,
            kind=step.kind if step else None,
            round=step.round if step else None,
            rounds=step.rounds if step else None,
            remaining_s=coordinator.remaining_s,
            answers=answers,
            asked=len(answers),
            answered=sum(a is Answer.UPDATED for a in answers.values()),
            connected=len(context.peers),
            ready=len(context.peers.announced()),
            worker_pid=worker.pid,
            worker_starts=worker.starts,
            worker_deaths=worker.deaths,
            lag=context.lag.lag,
        )

    def now(self) -> dict[str, Any]:
        """Return the run's progress."""
        return {name: getattr(self, name) for name in _NOW}

    def to_fields(self) -> dict[str, Any]:
        """Return its numbers and words, for pollers."""
        names = (spec.name for spec in fields(self) if spec.name not in _NOT_FOR_POLLERS)
        return {**{name: getattr(self, name) for name in names}, **self.lag.to_fields()}

    def line(self) -> str:
        """Return one line about the server's work, for its supervisor."""
        line = self.phase
        if self.task is not None and self.kind is not None:
            line = f"task {self.task}, {self.kind} {self.round}, {self.phase}"
        waiting = f"; waits for {self.waiting_for}" if self.waiting_for else ""
        return f"{line}; {count_of(self.ready, 'client')} ready{waiting}"


def gauges(context: ServerContext, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's current state for frequent pollers.

    Args:
        context: the server.
        asked: ``clients``: ids of clients to report as present or not (`MAX_TOLD_APART`).
    """
    wanted = asked.get("clients")
    ids = wanted[:MAX_TOLD_APART] if isinstance(wanted, list) else []
    here = {str(i): context.peers.by_client(ClientId(str(i))) is not None for i in ids}
    intake = context.intake_pool.describe() if context.intake_pool else []
    return {**LiveStatus.of(context).to_fields(), "here": here, "intake": intake}


@dataclass(frozen=True)
class UploadProgress:
    """A client's partially received update to the round under way.

    Attributes:
        received: bytes that are here and fit their hashes.
        expected: bytes of the sealed update, by its header; None: it was not offered yet.
    """

    received: int = 0
    expected: int | None = None


class LiveReports:
    """Reports the server's state and the round under way to the dashboard.

    An opened update leaves the assembly of its chunks, so its size is remembered here.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._opened: dict[ClientId, int] = {}  # sizes of this round's complete updates

    def round_opens(self, key: RoundKey) -> None:
        """Start from scratch; a round that a restart resumes has updates already."""
        accepted = self._context.ledger.updates.accepted(key)
        self._opened = {row.client: row.sealed_bytes for row in accepted}

    def opened(self, accepted: Accepted) -> None:
        """Note that an update is complete and valid."""
        for one in accepted.summed or (accepted,):
            self._opened[one.client] = one.sealed_bytes

    async def report(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's current state.

        Args:
            asked: ``peers``: True: also describe each connected client.
        """
        context, yielder = self._context, Yielder()
        live = LiveStatus.of(context)
        told = live.to_fields() | {
            "now": time.time(),
            "notes_last": context.journal.last,
            "round": await self._round(live, yielder),
        }
        if asked.get("peers") is True:
            told["peers"] = await self._peers(live.answers, yielder)
            told["relays"] = context.link.relays()
        return told

    # --- the round under way ------------------------------------------------------------------

    async def _round(self, live: LiveStatus, yielder: Yielder) -> dict[str, Any] | None:
        progress = self._context.run.coordinator.progress
        key, machine, answers = progress.key(live.run), progress.round, live.answers
        if key is None or machine is None:
            return None
        rules, opened_at = machine.rules, progress.opened_at
        uploads: dict[ClientId, UploadProgress] = {}
        ranks: list[list[ClientId]] = [[] for _ in range(_RANKS)]
        for client, answer in answers.items():
            uploads[client] = upload = self._upload(client, key)
            ranks[self._rank(client, answer, upload)].append(client)
            await yielder.yield_if_long()
        counts = Counter(answers.values())
        expected = [u.expected for u in uploads.values() if u.expected is not None]
        shown = list(islice(chain.from_iterable(ranks), MAX_SHOWN))
        return {
            **live.now(),
            "opened_at": opened_at,
            "deadline_s": rules.deadline_s,
            "quorum": machine.needed,
            "take": rules.take,
            "asked": live.asked,
            "answered": live.answered,
            "declined": counts[Answer.DECLINED],
            "lost": counts[Answer.LOST],
            "offered": len(expected),
            "received_bytes": sum(u.received for u in uploads.values()),
            "expected_bytes": sum(expected),
            "clients": [
                self._client(c, answers[c], machine.reasons.get(c, ""), uploads[c]) for c in shown
            ],
            "more": len(answers) - len(shown),
        }

    def _upload(self, client: ClientId, key: RoundKey) -> UploadProgress:
        for assembly in self._context.intake.arriving.of(client):
            core = assembly.header.core
            own = RoundKey(RunId(core.run), core.task, core.kind, core.round)
            if own == key or (own.precedes(key) and self._is_asynchronous(key.kind)):
                return UploadProgress(assembly.received_bytes, assembly.header.sealed_bytes)
        whole = self._opened.get(client)
        return UploadProgress() if whole is None else UploadProgress(whole, whole)

    def _is_asynchronous(self, kind: str) -> bool:
        return self._context.run.coordinator.context.is_asynchronous(kind)

    def _rank(self, client: ClientId, answer: Answer, upload: UploadProgress) -> int:
        """Order clients: sending, working, away, without an answer, answered."""
        if answer is not Answer.NONE:
            return 4 if answer is Answer.UPDATED else 3
        if upload.expected is not None:
            return 0
        return 2 if self._context.peers.by_client(client) is None else 1

    def _client(
        self, client: ClientId, answer: Answer, reason: str, upload: UploadProgress
    ) -> dict[str, Any]:
        peer = self._context.peers.by_client(client)
        return {
            "id": client,
            "name": peer.name if peer else self._context.run.coordinator.context.name_of(client),
            "here": peer is not None,
            "answer": answer.word,
            "reason": reason,
            "progress": peer.progress if peer else None,
            "received": upload.received,
            "expected": upload.expected,
            "paused": bool(peer and peer.paused),
        }

    # --- all clients ----------------------------------------------------------------------------

    async def _peers(self, answers: Mapping[ClientId, Answer], yielder: Yielder) -> dict[str, Any]:
        peers = self._context.peers
        found: dict[str, Any] = {}
        for peer in list(peers):
            # A client's answer makes its last progress report void.
            at_work = answers.get(peer.client, Answer.NONE) is Answer.NONE
            found[peer.client] = _peer(peer, peers.refused.get(peer.client, ""), at_work=at_work)
            await yielder.yield_if_long()
        for client, why in list(peers.refused.items()):
            found.setdefault(client, {**_AWAY, "state": "refused", "why": why})
        return found


_AWAY = {
    "name": "",
    "progress": None,
    "paused": False,
    "images": None,
    "classes": None,
    "agreement": None,
    "device": "",
    "package": "",
}


def _peer(peer: Peer, why: str, *, at_work: bool) -> dict[str, Any]:
    return {
        "name": peer.name,
        "state": peer.state,
        "progress": peer.progress if at_work else None,
        "paused": peer.paused,
        "images": sum(peer.train.values()) if peer.train is not None else None,
        "classes": len(peer.names) if peer.announced else None,
        "agreement": peer.agreement,
        "device": peer.device,
        "package": peer.package,
        "why": why,
    }
