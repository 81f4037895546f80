"""Status as plain data, from a running server or from the ledger alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcil_protocol.ids import ClientId, RunId
from fcil_server.daemon.live import LiveStatus
from fcil_server.event_loop import Yielder
from fcil_server.federation.eligibility import former_client_state
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow
from fcil_server.runs.run_queue import describe_waiting

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext


async def status(context: ServerContext) -> dict[str, Any]:
    """Return the complete status of a running server."""
    context.journal.write()  # the ledger then has all that the status names
    coordinator, live = context.run.coordinator, LiveStatus.of(context)
    run = context.ledger.runs.get(coordinator.context.run)
    assert run is not None
    return {
        "running": True,
        "federation": {
            "id": context.federation.id,
            "name": context.config.federation.name,
            "directory": str(context.federation.directory.resolve()),
            "addresses": context.addresses(),
            "port": context.port,
            "metrics": context.metrics.describe(),
            "page": context.page.describe(),
            "api": context.api.describe(),
            "intake": context.intake_pool.describe() if context.intake_pool else None,
            "up_s": round(time.monotonic() - context.began, 1),
        },
        "run": {
            "id": run.run_id,
            "status": run.status.value,
            "parent": run.parent_run and {"run": run.parent_run, "state": run.parent_state},
            "method": run.method,
            "backbone": coordinator.context.info.name,
            "directory": str(context.run.directory.resolve()),
            "state": coordinator.progress.number,
            "promoted": run.promoted,
            "best": await asyncio.to_thread(_best_of, context.ledger.path, run.run_id),
            "privacy": context.run.terms.privacy.model_dump(),
            "budget": run.environment.get("budget"),
            "training": context.ledger.updates.newest_training(run.run_id),
        },
        "now": {**live.now(), "answers": {c: a.word for c, a in live.answers.items()}},
        "clients": await _clients(context),
        "classes": _classes(context.ledger, run.run_id),
        "queue": await asyncio.to_thread(describe_waiting, context.federation.directory),
        "refused": context.journal.refused,
        "loop": live.lag.to_fields(),
        "notes": context.journal.latest(20),
    }


async def _clients(context: ServerContext) -> list[dict[str, Any]]:
    run, path = context.run.coordinator.context.run, context.ledger.path
    learned = {t.task for t in context.ledger.tasks.all(run) if t.closed_at is not None}

    def read() -> tuple[
        list[ClientRow], dict[ClientId, set[int]]
    ]:  # thousands of rows: in a thread
        with Ledger(path, read_only=True) as ledger:
            return ledger.clients.all(), ledger.updates.counted_tasks(run)

    clients, took_part = await asyncio.to_thread(read)
    rows, names = [], {row.client_id: row.name for row in clients}
    now, yielder = context.ledger.now, Yielder()
    for row in clients:
        await yielder.yield_if_long()
        peer = context.peers.by_client(row.client_id)
        why = context.peers.refused.get(row.client_id, "")
        away = "refused" if why else "away"
        state = away if peer is None else peer.state
        if row.role is Role.RELAY:
            state = "ready" if context.link.has(row.client_id) else away
        rows.append(
            {
                "id": row.client_id,
                "name": row.name,
                "state": former_client_state(row) or state,
                "why": why,
                "role": row.role.value,
                "via": names.get(row.via) if row.via else None,
                "device": row.device,
                "agreement": peer.agreement if peer else None,
                # The ledger notes when a client came and left; a connected one is here now.
                "last_seen": row.last_seen if state == away else now,
                "images": sum((peer.train or {}).values()) if peer else None,
                "classes": len(peer.names) if peer else None,
                "progress": peer.progress if peer else None,
                "paused": bool(peer and peer.paused),
                "learned_before": list(peer.untrained) if peer else [],
                # Clients catch up on those tasks in the next round that asks them.
                "missed_tasks": sorted(learned - took_part.get(row.client_id, set()))
                if row.role is not Role.RELAY
                else [],
            }
        )
    return rows


def _best_of(path: Path, run: RunId) -> dict[str, Any] | None:
    with Ledger(path, read_only=True) as ledger:  # many results: in a thread
        return _best(ledger, run)


def _best(ledger: Ledger, run: RunId) -> dict[str, Any] | None:
    best = ledger.evaluations.best(run)
    return None if best is None else best.to_json()


def _classes(ledger: Ledger, run: RunId) -> list[dict[str, Any]]:
    return [
        {
            "id": c.class_id,
            "name": c.name,
            "task": c.task,
            "waiting": c.task is None,
            "admitted": c.admitted,
        }
        for c in ledger.classes.all(run)
        if not c.hidden
    ]


def stopped_status(ledger: Ledger, directory: str) -> dict[str, Any]:
    """Return the status from the ledger while no server runs."""
    run = ledger.runs.newest()
    open_round = ledger.rounds.current(run.run_id) if run else None
    clients = ledger.clients.all()
    names = {c.client_id: c.name for c in clients}
    return {
        "running": False,
        "federation": {"directory": directory},
        "run": run
        and {
            "id": run.run_id,
            "status": run.status.value,
            "parent": run.parent_run and {"run": run.parent_run, "state": run.parent_state},
            "method": run.method,
            "backbone": run.backbone.get("name"),
            "budget": run.environment.get("budget"),
            "training": ledger.updates.newest_training(run.run_id),
            "promoted": run.promoted,
            "best": _best(ledger, run.run_id),
        },
        "now": {
            "phase": "stopped",
            "waiting_for": "the server to be started: fcil-server serve",
            "task": open_round.task if open_round else None,
            "kind": open_round.kind if open_round else None,
            "round": open_round.round if open_round else None,
        },
        "clients": [
            {
                "id": c.client_id,
                "name": c.name,
                "state": former_client_state(c) or "away",
                "role": c.role.value,
                "via": names.get(c.via) if c.via else None,
                "last_seen": c.last_seen,
            }
            for c in clients
        ],
        "classes": _classes(ledger, run.run_id) if run else [],
        "queue": describe_waiting(Path(directory)),
    }
