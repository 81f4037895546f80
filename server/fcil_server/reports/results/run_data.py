"""One run as its reports show it, read from the ledger once.

The run directory, the HTML report, the plots and the terminal tables all use `collect`, so they
cannot disagree, and all of them can be made again at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger.enums import Answer, Cause, CountSource, Direction, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ByteCount, ClassRow, ClientRow, Event, RoundRow, RunRow, TaskRow
from fcil_server.reports.results import metrics
from fcil_server.reports.results.metrics import Measured, Metrics

_EVENTS = 50  # warnings and errors that a report lists


@dataclass(frozen=True)
class Bytes:
    """Bytes of one direction.

    The first four are exact counts and the exact prediction of every message. The others are the
    kernel's counts of whole connections, 0 if it was not asked: TCP payload, each byte once; the
    retransmitted part of it, down only; all as frames of an Ethernet link.

    Attributes:
        true_wire: TCP payload by the kernel's count, or by prediction in rounds (and directions)
            for which it was not asked.
        rest: the kernel's count beyond the messages: heartbeats, answers to strangers. Negative by
            bytes that were on their way when it was asked.
    """

    tensor: int = 0
    sealed: int = 0
    application: int = 0
    wire: int = 0
    wire_kernel: int = 0
    retransmitted: int = 0
    link: int = 0
    true_wire: int = 0
    rest: int = 0

    @classmethod
    def total(cls, counts: Iterable[ByteCount]) -> Bytes:
        """Sum counts; predicted and kernel-counted wire bytes stay separate."""
        places: defaultdict[object, list[ByteCount]] = defaultdict(list)
        for count in counts:
            where = (count.run, count.task, count.kind, count.round, count.direction)
            places[where].append(count)
        return sum((cls.of_one_place(found) for found in places.values()), start=cls())

    @classmethod
    def of_one_place(cls, counts: Sequence[ByteCount]) -> Bytes:
        """Sum the counts of one round and direction."""
        wire = sum(c.wire for c in counts if c.source is not CountSource.KERNEL)
        kernel = sum(c.wire for c in counts if c.source is CountSource.KERNEL)
        return cls(
            tensor=sum(c.tensor for c in counts),
            sealed=sum(c.sealed for c in counts),
            application=sum(c.application for c in counts),
            wire=wire,
            wire_kernel=kernel,
            retransmitted=sum(c.retransmitted for c in counts),
            link=sum(c.link for c in counts),
            true_wire=kernel or wire,
            rest=kernel - wire if kernel else 0,
        )

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*map(int.__add__, _numbers(self), _numbers(other)))


_numbers = attrgetter(*(spec.name for spec in fields(Bytes)))  # astuple copies: 20 times slower


@dataclass(frozen=True)
class RoundView:
    """One round with its participants and its cost.

    Attributes:
        updates: number received, counted or not.
    """

    round: RoundRow
    updates: int
    counted: tuple[ClientId, ...]
    excluded: Mapping[ClientId, str]  # client -> reason
    silent: Mapping[ClientId, tuple[Answer, str]]  # asked, no update: answer and reason
    up: Bytes
    down: Bytes
    flows: tuple[ByteCount, ...] = ()

    def line(self) -> dict[str, Any]:
        """Return the round's line of ``rounds.jsonl``."""
        row = self.round
        return {
            "seq": row.seq,
            "task": row.task,
            "kind": row.kind,
            "round": row.round,
            "outcome": None if row.outcome is None else row.outcome.value,
            "closed_by": row.why,
            "reopened": row.reopened,
            "opened_at": row.opened_at,
            "closed_at": row.closed_at,
            "base_state": row.base_state,
            "new_state": row.new_state,
            "asked": list(row.asked),
            "counted": list(self.counted),
            "excluded": dict(self.excluded),
            "silent": {c: {"answer": a.value, "reason": r} for c, (a, r) in self.silent.items()},
            "seconds": dict(row.phases),
            "bytes": {"up": asdict(self.up), "down": asdict(self.down)},
            "metrics": dict(row.metrics),
        }


@dataclass(frozen=True)
class RunData(Measured):
    """All data of a run for reports.

    Attributes:
        rounds: closed rounds in order.
        clients: all that were asked, answered or have byte counts, by id.
        pooled: metrics over the clients' test images; ``central`` over the server's folder.
        flows: the run's byte counts; ``outside``: the federation's that belong to no run.
        events: the run's newest warnings and errors, the newest first.
    """

    run: RunRow
    tasks: tuple[TaskRow, ...]
    classes: tuple[ClassRow, ...]
    rounds: tuple[RoundView, ...]
    clients: Mapping[ClientId, ClientRow]
    pooled: Metrics | None
    central: Metrics | None
    flows: tuple[ByteCount, ...]
    outside: tuple[ByteCount, ...]
    events: tuple[Event, ...] = ()

    @cached_property
    def class_names(self) -> Mapping[int, str]:
        """Class id -> name."""
        return {c.class_id: c.name for c in self.classes if c.class_id is not None}

    def bytes_of(self, direction: Direction, cause: Cause | None = None) -> Bytes:
        """Sum the run's bytes in one direction, of one cause or of all."""
        return Bytes.total(
            f for f in self.flows if f.direction is direction and cause in (None, f.cause)
        )

    def seconds(self) -> dict[str, float]:
        """Return the run's seconds from its start to its last closed round, and per phase."""
        ends = [v.round.closed_at for v in self.rounds if v.round.closed_at is not None]
        # A fork's first rounds are older than the run itself.
        total = {"total_s": max(0.0, max(ends) - self.run.created_at) if ends else 0.0}
        for view in self.rounds:
            for phase, seconds in view.round.phases.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    def name_of(self, client: str) -> str:
        """Return a client's name, or its id if it has none."""
        row = self.clients.get(ClientId(client))
        return client if row is None else row.name


def collect(ledger: Ledger, run_id: RunId) -> RunData:
    """Read a run.

    Raises:
        UsageError: the federation has no such run.
    """
    run = ledger.runs.get(run_id)
    if run is None:
        known = ", ".join(r.run_id for r in ledger.runs.all()[-5:]) or "none yet"
        raise UsageError(
            f"there is no run {run_id!r} in {ledger.path}; the newest are {known}.",
            action="List all of them with: fcil-server run ls",
        )
    tasks = ledger.tasks.all(run_id)
    flows = ledger.bytes.all(run_id)
    evaluations = ledger.evaluations.all(run_id)
    increments = [t.class_ids for t in tasks]
    views = tuple(v for v in round_views(ledger, run_id, flows) if v.round.closed_at is not None)
    return RunData(
        run=run,
        tasks=tuple(tasks),
        classes=tuple(ledger.classes.all(run_id)),
        rounds=views,
        clients=_participants(ledger, views, flows),
        pooled=metrics.pooled(evaluations, increments),
        central=metrics.central(evaluations, increments),
        flows=tuple(flows),
        outside=tuple(ledger.bytes.all(None)),
        events=tuple(e for e in ledger.events.newest(run_id)[::-1] if e.level != "info")[:_EVENTS],
    )


def round_views(
    ledger: Ledger, run: RunId, flows: Iterable[ByteCount] | None = None
) -> list[RoundView]:
    """Read all rounds of a run in order, and any open one; ``flows`` are its known byte counts."""
    by_round: defaultdict[object, list[ByteCount]] = defaultdict(list)
    for flow in ledger.bytes.all(run) if flows is None else flows:
        by_round[flow.run, flow.task, flow.kind, flow.round].append(flow)
    return [_round_view(ledger, row, by_round[row.key]) for row in ledger.rounds.all(run)]


def round_view(ledger: Ledger, row: RoundRow) -> RoundView:
    """Read one round."""
    return _round_view(ledger, row, ledger.bytes.of_round(row.key))


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


def sum_bytes(parts: Iterable[Bytes]) -> Bytes:
    """Add up the bytes of several rounds."""
    return sum(parts, start=Bytes())


# Purposes of bytes on the wire, in the order in which charts stack them.
CAUSES = {
    Cause.UPDATE: "updates",
    Cause.BROADCAST: "broadcasts",
    Cause.CATCH_UP: "catch-up",
    Cause.CONTROL: "control",
    Cause.HANDSHAKE: "handshakes",
}
REST = "heartbeats and the rest"


def _round_view(ledger: Ledger, row: RoundRow, mine: Sequence[ByteCount]) -> RoundView:
    updates = ledger.updates.of_round(row.key)
    return RoundView(
        round=row,
        updates=len(updates),
        counted=tuple(u.client for u in updates if u.status is UpdateStatus.COUNTED),
        excluded={u.client: u.reason for u in updates if u.status is UpdateStatus.EXCLUDED},
        silent={a.client: (a.answer, a.reason) for a in ledger.answers.of_round(row.key)},
        up=Bytes.total(f for f in mine if f.direction is Direction.UP),
        down=Bytes.total(f for f in mine if f.direction is Direction.DOWN),
        flows=tuple(mine),
    )


def _participants(
    ledger: Ledger, views: Sequence[RoundView], flows: Sequence[ByteCount]
) -> dict[ClientId, ClientRow]:
    took_part = {c for v in views for c in (*v.round.asked, *v.counted, *v.excluded)}
    took_part |= {f.client for f in flows if f.client is not None}
    return {c.client_id: c for c in ledger.clients.all() if c.client_id in took_part}
