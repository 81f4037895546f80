"""Status and rounds as plain data, from a running server or from the ledger alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fcil_protocol.ids import ClientId, RunId
from fcil_server.event_loop import Yielder
from fcil_server.federation.eligibility import gone_client
from fcil_server.ledger.enums import CountSource, Role
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow
from fcil_server.reports.results.run_data import RoundView, round_views

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext


async def status(context: ServerContext) -> dict[str, Any]:
    """Return the complete status of a running server."""
    context.journal.write()  # the ledger then has all that the status names
    coordinator = context.run.coordinator
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
            "privacy": context.run.terms.privacy.model_dump(),
            "budget": run.environment.get("budget"),
        },
        "now": _now(context),
        "clients": await _clients(context),
        "classes": _classes(context.ledger, run.run_id),
        "refused": context.journal.refused,
        "loop": context.lag.lag.to_fields(),
        "notes": context.journal.latest(20),
    }


def status_line(context: ServerContext) -> str:
    """Return one line about the server's work, for its supervisor."""
    now = _now(context)
    line = str(now["phase"])
    if now["task"] is not None and now["kind"] is not None:
        line = f"task {now['task']}, {now['kind']} {now['round']}, {now['phase']}"
    here = sum(1 for _ in context.peers.announced())
    waiting = f"; waits for {now['waiting_for']}" if now["waiting_for"] else ""
    return f"{line}; {here} clients ready{waiting}"


def _now(context: ServerContext) -> dict[str, Any]:
    coordinator = context.run.coordinator
    progress = coordinator.progress
    machine = progress.round
    return {
        "phase": progress.phase,
        "mode": progress.mode.value,
        "waiting_for": progress.waiting_for,
        "task": progress.task.index if progress.task else None,
        "kind": progress.step.kind if progress.step else None,
        "round": progress.step.round if progress.step else None,
        "rounds": progress.step.rounds if progress.step else None,
        "remaining_s": coordinator.remaining_s,
        "answers": {c: a.word for c, a in machine.answers.items()} if machine else {},
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
    rows = []
    now, yielder = context.ledger.now, Yielder()
    for row in clients:
        await yielder.maybe_yield()
        peer = context.peers.by_client(row.client_id)
        why = context.peers.refused.get(row.client_id, "")
        away = "refused" if why else "away"
        state = away if peer is None else "ready" if peer.announced else "preparing"
        if peer is not None and peer.resting:
            state = "resting"
        if row.role is Role.RELAY:
            state = "ready" if context.link.has(row.client_id) else away
        rows.append(
            {
                "id": row.client_id,
                "name": row.name,
                "state": gone_client(row) or state,
                "why": why,
                "role": row.role.value,
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
                "missed_tasks": sorted(learned - took_part.get(row.client_id, set())),
            }
        )
    return rows


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
                "state": gone_client(c) or "away",
                "last_seen": c.last_seen,
            }
            for c in ledger.clients.all()
        ],
        "classes": _classes(ledger, run.run_id) if run else [],
    }


def round_rows(ledger: Ledger, run: RunId) -> list[dict[str, Any]]:
    """Return one row per round: its clients, its duration, its cost."""
    names = {c.client_id: c.name for c in ledger.clients.all()}
    return [_round_row(view, names, ledger.now) for view in round_views(ledger, run)]


def _round_row(view: RoundView, names: Mapping[ClientId, str], now: float) -> dict[str, Any]:
    row, up, down = view.round, view.up, view.down
    kernel = bool(up.wire_kernel and down.wire_kernel)
    return {
        "seq": row.seq,
        "task": row.task,
        "kind": row.kind,
        "round": row.round,
        "outcome": row.outcome.value if row.outcome else "open",
        "closed_by": row.why,
        "reopened": row.reopened,
        "asked": len(row.asked),
        "updates": view.updates,
        "counted": len(view.counted),
        "answers": [
            {"client": c, "name": names.get(c, ""), "answer": answer.value, "reason": reason}
            for c, (answer, reason) in view.silent.items()
        ],
        "excluded": [
            {"client": c, "name": names.get(c, ""), "reason": reason}
            for c, reason in view.excluded.items()
        ],
        # From its opening to its end, or to now; includes time while the server was down.
        "seconds": round(max(0.0, (row.closed_at or now) - row.opened_at), 3),
        "wire_up": up.true_wire,
        "wire_down": down.true_wire,
        "wire_source": (CountSource.KERNEL if kernel else CountSource.PREDICTED).value,
        "tensors_up": up.tensor,
        "tensors_down": down.tensor,
    }
