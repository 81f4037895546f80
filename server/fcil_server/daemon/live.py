"""A running server's answer to its dashboard: the round under way, its clients, current bytes.

One process asks once a second, however many dashboards are open. The answer comes from memory; only
names of absent clients are looked up, at most `MAX_SHOWN` of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from fcil_protocol.ids import ClientId, RoundKey
from fcil_server.daemon.context import ServerContext
from fcil_server.daemon.gauges import gauges
from fcil_server.event_loop import Yielder
from fcil_server.ledger.enums import Answer
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Accepted

MAX_SHOWN = 60  # clients of the round that are listed one by one
_RANKS = 5


@dataclass(frozen=True)
class UploadProgress:
    """A client's partially received update to the round under way.

    Attributes:
        received: bytes that are here and fit their hashes.
        expected: bytes of the sealed update, by its header; None: it was not offered yet.
    """

    received: int = 0
    expected: int | None = None


class LiveStatus:
    """Reports the round under way.

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
        self._opened[accepted.client] = accepted.sealed_bytes

    async def report(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's current state.

        Args:
            fields: ``peers``: True: also describe each connected client.
        """
        context, yielder = self._context, Yielder()
        told = gauges(context, {})
        del told["here"]
        told |= {
            "now": time.time(),
            "notes_last": context.journal.last,
            "round": await self._round(yielder),
        }
        if fields.get("peers") is True:
            told["peers"] = await self._peers(yielder)
            told["relays"] = context.link.relays()
        return told

    # --- the round under way ------------------------------------------------------------------

    async def _round(self, yielder: Yielder) -> dict[str, Any] | None:
        coordinator = self._context.run.coordinator
        progress = coordinator.progress
        if progress.task is None or progress.step is None or progress.round is None:
            return None
        machine, rules = progress.round, progress.round.rules
        answers = dict(machine.answers)
        key = RoundKey(
            coordinator.context.run, progress.task.index, progress.step.kind, progress.step.round
        )
        uploads: dict[ClientId, UploadProgress] = {}
        ranks: list[list[ClientId]] = [[] for _ in range(_RANKS)]
        for client, answer in answers.items():
            uploads[client] = upload = self._upload(client, key)
            ranks[self._rank(client, answer, upload)].append(client)
            await yielder.maybe_yield()
        counts = Counter(answers.values())
        expected = [u.expected for u in uploads.values() if u.expected is not None]
        shown = list(islice(chain.from_iterable(ranks), MAX_SHOWN))
        return {
            "kind": key.kind,
            "task": key.task,
            "round": key.round,
            "rounds": progress.step.rounds,
            "phase": progress.phase,
            "mode": progress.mode.value,
            "waiting_for": progress.waiting_for,
            "opened_at": progress.opened_at,
            "remaining_s": coordinator.remaining_s,
            "deadline_s": rules.deadline_s,
            "quorum": max(rules.quorum or rules.min_clients, rules.min_updates),
            "take": rules.take,
            "asked": len(answers),
            "answered": counts[Answer.UPDATED],
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
            if (core.run, core.task, core.kind, core.round) == key:
                return UploadProgress(assembly.received_bytes, assembly.header.sealed_bytes)
        whole = self._opened.get(client)
        return UploadProgress() if whole is None else UploadProgress(whole, whole)

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

    async def _peers(self, yielder: Yielder) -> dict[str, Any]:
        peers, progress = self._context.peers, self._context.run.coordinator.progress
        answers = progress.round.answers if progress.round is not None else {}
        found: dict[str, Any] = {}
        for peer in list(peers):
            # A client's answer makes its last progress report void.
            at_work = answers.get(peer.client, Answer.NONE) is Answer.NONE
            found[peer.client] = _peer(peer, peers.refused.get(peer.client, ""), at_work=at_work)
            await yielder.maybe_yield()
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
    state = "resting" if peer.resting else "ready" if peer.announced else "preparing"
    return {
        "name": peer.name,
        "state": state,
        "progress": peer.progress if at_work else None,
        "paused": peer.paused,
        "images": sum(peer.train.values()) if peer.train is not None else None,
        "classes": len(peer.names) if peer.announced else None,
        "agreement": peer.agreement,
        "device": peer.device,
        "package": peer.package,
        "why": why,
    }
