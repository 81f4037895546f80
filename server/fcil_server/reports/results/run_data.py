"""One run as its reports show it, read from the ledger once.

The run directory, the HTML report, the plots and the terminal tables all use `collect`, so they
cannot disagree, and all of them can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.formats import format_bytes, percent, points
from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger.databases.opening import has_ledger
from fcil_server.ledger.enums import Cause, CountSource, Direction, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import (
    ClassRow,
    ClientRow,
    Event,
    RoundRow,
    RunRow,
    TaskRow,
)
from fcil_server.ledger.tasks import StateResult
from fcil_server.reports.results import metrics
from fcil_server.reports.results.metrics import Measured, Metrics
from fcil_server.reports.results.round_views import Bytes, RoundReader, RoundView, Sums

COMPARISON_HEAD = (
    "run", "method", "FAA", "AIA", "forgetting", "up", "down", "tensors up", "tensors down",
)  # fmt: skip
_EVENTS = 50  # warnings and errors that a report lists


@dataclass(frozen=True)
class RunData(Measured):
    """All data of a run for reports.

    Attributes:
        rounds: closed rounds in order.
        clients: all that were asked, answered or have byte counts, by id.
        pooled: metrics over the clients' test images; ``central`` over the server's folder.
        best: the best tested state.
        sums: of all rounds, the open one too, and of the run's bytes outside its rounds.
        outside: the federation's bytes that belong to no run, by direction.
        events: the run's newest warnings and errors, the newest first.
    """

    run: RunRow
    tasks: tuple[TaskRow, ...]
    classes: tuple[ClassRow, ...]
    rounds: tuple[RoundView, ...]
    clients: Mapping[ClientId, ClientRow]
    pooled: Metrics | None
    central: Metrics | None
    best: StateResult | None
    sums: Sums
    outside: Mapping[Direction, Bytes]
    events: tuple[Event, ...] = ()

    @cached_property
    def class_names(self) -> Mapping[int, str]:
        """Class id -> name."""
        return {c.class_id: c.name for c in self.classes if c.class_id is not None}

    def bytes_of(self, direction: Direction, cause: Cause | None = None) -> Bytes:
        """Sum the run's bytes in one direction, of one cause or of all."""
        return self.sums.totals.get((direction, cause), Bytes())

    def seconds(self) -> dict[str, float]:
        """Return the run's seconds from its start to its last closed round, and per phase."""
        ends = [v.round.closed_at for v in self.rounds if v.round.closed_at is not None]
        # A fork's first rounds are older than the run itself.
        total = {"total_s": max(0.0, max(ends) - self.run.created_at) if ends else 0.0}
        for view in self.rounds:
            for phase, seconds in view.round.phases.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total


def locate_run(place: Path) -> tuple[Path, str | None]:
    """Return the federation's directory and the run of a path; None: its newest run.

    Raises:
        UsageError: it is neither a federation's directory nor one of its runs.
    """
    # A run directory is <federation>/runs/<run>.
    directory, run = place, None
    if not has_ledger(place):
        directory, run = place.parent.parent, place.name
    if not has_ledger(directory):
        raise UsageError(
            f"{place} is neither a federation's directory nor one of its runs.",
            action="Give a directory that holds a ledger, or one of the directories in its runs/.",
        )
    return directory, run


def collect(ledger: Ledger, run_id: RunId) -> RunData:
    """Read a run, as it is at one moment.

    Raises:
        UsageError: the federation has no such run.
    """
    with ledger.database.moment():
        return _collect(ledger, run_id)


def _collect(ledger: Ledger, run_id: RunId) -> RunData:
    run = ledger.runs.get(run_id)
    if run is None:
        known = ", ".join(r.run_id for r in ledger.runs.all()[-5:]) or "none yet"
        raise UsageError(
            f"there is no run {run_id!r} in {ledger.path}; the newest are {known}.",
            action="List all of them with: fcil-server run ls",
        )
    tasks = ledger.tasks.all(run_id)
    evaluations = ledger.evaluations.all(run_id)
    increments = [t.class_ids for t in tasks]
    reader = RoundReader(ledger.database)
    views = [reader.view(row) for row in reader.rounds.all(run_id)]
    sums = reader.rest(run_id)
    for view in views:
        sums.add(reader.sums(view))
    outside = reader.rest(None).totals
    closed = tuple(view for view in views if view.round.closed_at is not None)
    return RunData(
        run=run,
        tasks=tuple(tasks),
        classes=tuple(ledger.classes.all(run_id)),
        rounds=closed,
        clients=_participants(ledger, closed, sums),
        pooled=metrics.pooled(evaluations, increments),
        central=metrics.central(evaluations, increments),
        best=ledger.evaluations.best(run_id),
        sums=sums,
        outside={d: outside.get((d, None), Bytes()) for d in Direction},
        events=tuple(ledger.events.newest(run_id, limit=_EVENTS, notable=True)[::-1]),
    )


def run_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Return one row per run of the federation, the oldest first."""
    return [
        {
            "id": r.run_id,
            "status": r.status.value,
            "method": r.method,
            "tasks": ledger.tasks.count(r.run_id),
            "rounds": ledger.rounds.count(r.run_id),
            "created_at": r.created_at,
            "parent": r.parent_run and {"run": r.parent_run, "state": r.parent_state},
            "emptied_at": r.emptied_at,
            "title": (r.environment.get("submitted") or {}).get("title") or None,
        }
        for r in ledger.runs.all()
    ]


def round_rows(
    ledger: Ledger, run: RunId, *, since: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return one row per round: its clients, its duration, its cost.

    Args:
        ledger: the federation's.
        run: the run.
        since: the first round by its ordinal.
        limit: most rows; None: all.
    """
    names = {c.client_id: c.name for c in ledger.clients.all()}
    reader = RoundReader(ledger.database)
    rows = reader.rounds.all(run, since, limit)
    return [_round_row(reader.view(row), names, _end(ledger, row)) for row in rows]


def _end(ledger: Ledger, row: RoundRow) -> float:
    """Return when a round was closed: now, if it is open; if it was cut off, its last news."""
    if row.closed_at is not None:
        return row.closed_at
    run = ledger.runs.get(row.run)
    if run is None or run.status is RunStatus.RUNNING:
        return ledger.now
    updates = ledger.updates.of_round(row.key)
    return max((update.accepted_at for update in updates), default=row.opened_at)


def _round_row(view: RoundView, names: Mapping[ClientId, str], end: float) -> dict[str, Any]:
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
        "train_loss": view.training.loss,
        "train_accuracy": view.training.accuracy,
        "test_accuracy": view.tested,
        "counted": len(view.counted),
        "answers": [
            {"client": c, "name": names.get(c, ""), "answer": answer.value, "reason": reason}
            for c, (answer, reason) in view.silent.items()
        ],
        "excluded": [
            {"client": c, "name": names.get(c, ""), "reason": reason}
            for c, reason in view.excluded.items()
        ],
        "stale": [
            {"client": c, "name": names.get(c, ""), "states": states}
            for c, states in view.stale.items()
        ],
        # From its opening to its end, or to now; includes time while the server was down.
        "seconds": round(max(0.0, end - row.opened_at), 3),
        "wire_up": up.true_wire,
        "wire_down": down.true_wire,
        "wire_source": (CountSource.KERNEL if kernel else CountSource.PREDICTED).value,
        "object_store": down.object_store,
        "tensors_up": up.tensor,
        "tensors_down": down.tensor,
    }


def _participants(
    ledger: Ledger, views: Sequence[RoundView], sums: Sums
) -> dict[ClientId, ClientRow]:
    took_part = {c for v in views for c in (*v.round.asked, *v.counted, *v.excluded)}
    took_part |= {client for client, _ in sums.sizes}
    return {c.client_id: c for c in ledger.clients.all() if c.client_id in took_part}


def comparison_row(
    name: str,
    method: str,
    headline: tuple[float | None, float | None, float | None],
    ways: Sequence[Bytes],
) -> tuple[str, ...]:
    """Return the line of one run in a comparison; ``ways`` are its bytes in each `Direction`."""
    faa, aia, lost = headline
    return (
        name,
        method,
        *map(percent, (faa, aia)),
        points(lost),
        *(format_bytes(b.true_wire) for b in ways),
        *(format_bytes(b.tensor) for b in ways),
    )


def shown_environment(run: RunRow) -> dict[str, Any]:
    """Return the facts about a run's environment for reports: no submitter, and none of its paths.

    A submitted run's settings are those of its configuration, which reports show too.
    """
    found = dict(run.environment)
    if submitted := found.get("submitted"):
        found["submitted"] = {name: submitted.get(name) for name in ("number", "title")}
    return found
