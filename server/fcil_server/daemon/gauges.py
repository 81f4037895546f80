"""Numbers about a running server for frequent pollers, without disk access."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext

MAX_TOLD_APART = 1000  # clients whose presence a poller may ask for by id


def gauges(context: ServerContext, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the server's current state.

    Args:
        context: the server.
        fields: ``clients``: ids of clients to report as present or not (`MAX_TOLD_APART`).
    """
    coordinator = context.run.coordinator
    progress = coordinator.progress
    answers = progress.round.answers if progress.round is not None else {}
    worker = coordinator.context.aggregation.worker
    wanted = fields.get("clients")
    ids = wanted[:MAX_TOLD_APART] if isinstance(wanted, list) else []
    return {
        "pid": os.getpid(),
        "started_at": context.started_at,
        "run": coordinator.context.run,
        "phase": progress.phase,
        "mode": progress.mode.value,
        "waiting_for": progress.waiting_for,
        "task": progress.task.index if progress.task else None,
        "kind": progress.step.kind if progress.step else None,
        "round": progress.step.round if progress.step else None,
        "remaining_s": coordinator.remaining_s,
        "asked": len(answers),
        "answered": sum(a is Answer.UPDATED for a in answers.values()),
        "connected": len(context.peers),
        "ready": sum(1 for _ in context.peers.announced()),
        "here": {str(i): context.peers.by_client(ClientId(str(i))) is not None for i in ids},
        "worker_pid": worker.pid,
        "worker_starts": worker.starts,
        "worker_deaths": worker.deaths,
        **context.lag.lag.to_fields(),
    }
