"""Running totals over the whole ledger, for frequent requests (`exposition`).

Counters over all runs of a federation only ever grow: a fork's copies of older rounds are excluded,
as in `ledger.byte_counts`. The totals of closed rounds are added up once and remembered, so that a
request costs no more as the history grows; the open round and those just closed are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from fcil_server.ledger.byte_counts import LEVELS, Place, no_round
from fcil_server.ledger.databases.opening import open_database
from fcil_server.ledger.enums import CENTRAL, Cause, CountSource, Direction, Role
from fcil_server.ledger.events import RefusalTable
from fcil_server.ledger.rounds import UpdateTable
from fcil_server.ledger.rows import ByteCount, RoundRow, RunRow
from fcil_server.ledger.runs import RunTable
from fcil_server.ledger.tasks import EvaluationTable, TaskTable
from fcil_server.reports.results import metrics
from fcil_server.reports.results.round_views import RoundReader

# Counts of a closed round may still be on their way to the ledger: `daemon.server.FLUSH_S` and
# more.
SETTLED_S = 120.0

K = TypeVar("K")
N = TypeVar("N", int, float)

Flow = tuple[Direction, Cause, CountSource]


def _increase(mine: dict[K, N], more: Mapping[K, N]) -> None:
    for key, value in more.items():
        mine[key] += value


@dataclass
class Counts:
    """Counts that are summed over rounds.

    Attributes:
        rounds: (kind, outcome) -> closed rounds; ``reopened``: kind -> times.
        seconds: (kind, phase) -> seconds.
        updates: (kind, status) -> updates; each is in ``accepted``, later in another, too, and in
            ``stale`` if it starts from an older state.
        answers: answer -> number of asked clients that gave it instead of an update to a closed
            round.
        flows: -> bytes by level, in the order of `LEVELS`.
        clients: id -> (updates counted, predicted wire bytes up, down), for listed members.
    """

    rounds: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    reopened: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    updates: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    answers: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    flows: dict[Flow, tuple[int, ...]] = field(default_factory=dict)
    clients: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        """Add another's counts to these."""
        _increase(self.rounds, other.rounds)
        _increase(self.reopened, other.reopened)
        _increase(self.seconds, other.seconds)
        _increase(self.updates, other.updates)
        _increase(self.answers, other.answers)
        for flow, sizes in other.flows.items():
            self.add_flow(flow, sizes)
        for client, told in other.clients.items():
            self.add_client(client, told)

    def add_flow(self, flow: Flow, sizes: tuple[int, ...]) -> None:
        """Add bytes by level."""
        held = self.flows.get(flow, (0,) * len(LEVELS))
        self.flows[flow] = tuple(a + b for a, b in zip(held, sizes, strict=True))

    def add_client(self, client: str, told: tuple[int, int, int]) -> None:
        """Add one client's counts."""
        a, b, c = self.clients.get(client, (0, 0, 0))
        self.clients[client] = (a + told[0], b + told[1], c + told[2])


@dataclass(frozen=True)
class Totals:
    """The ledger at one moment.

    Attributes:
        run: the newest run; None before the first.
        state: number of its newest state; None before the first.
        tasks, tasks_done, classes, waiting: of that run: opened, learned, names that entered a
            task, names that wait for one.
        members: role -> members that may join.
        refusals: code -> messages ever refused.
        accuracy: of that run, as in reports; None before the first evaluation.
        training: of that run's newest round that has a training loss, `UpdateTable`.
        named: id -> name of the members with metrics of their own.
        size_bytes: of the ledger with its log.
    """

    run: RunRow | None
    state: int | None
    tasks: int
    tasks_done: int
    classes: int
    waiting: int
    members: Mapping[str, int]
    refusals: Mapping[str, int]
    accuracy: metrics.Metrics | None
    training: Mapping[str, Any] | None
    counts: Counts
    named: Mapping[str, str]
    size_bytes: int


class TotalsReader:
    """A reader of totals; it remembers totals that cannot change any more.

    Args:
        path: of the ledger.
        clients: number of members with counts of their own, the first to be enrolled.

    Attributes:
        database: the ledger's file, read-only.

    Raises:
        As `Database`.
    """

    def __init__(self, path: Path, *, clients: int = 0) -> None:
        self.database = open_database(path, read_only=True)
        self._runs = RunTable(self.database)
        self._tasks = TaskTable(self.database)
        self._evaluations = EvaluationTable(self.database)
        self._refusals = RefusalTable(self.database)
        self._told_apart = clients
        self._reader = RoundReader(self.database)
        self._settled = Counts()
        self._past = 0  # rowid of the newest round that was read
        self._open: set[int] = set()  # rows up to it that are not settled
        self._accuracy: tuple[object, metrics.Metrics | None] = (None, None)

    def close(self) -> None:
        """Close the ledger."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> Totals:
        """Return the ledger as it is now."""
        with self.database.moment():
            counts = self._counts()
            run = self._runs.newest()
            own = (run.run_id if run else "",)
            tasks = self._tasks.all(run.run_id) if run else []
            return Totals(
                run=run,
                state=self.database.number("SELECT max(state) FROM states WHERE run = ?", own),
                tasks=len(tasks),
                tasks_done=sum(t.closed_at is not None for t in tasks),
                classes=self.database.number(
                    "SELECT count(*) FROM classes WHERE run = ? AND task IS NOT NULL", own
                ),
                waiting=self.database.number(
                    "SELECT count(*) FROM classes WHERE run = ? AND task IS NULL AND hidden = 0",
                    own,
                ),
                members=self._members(),
                refusals=self._refusals.counts(),
                accuracy=self._accuracy_of(run, sum(counts.rounds.values())),
                training=UpdateTable(self.database).newest_training(run.run_id) if run else None,
                counts=counts,
                named=self._named(),
                size_bytes=self.database.size_bytes(),
            )

    def _members(self) -> dict[str, int]:
        sql = (
            "SELECT role, count(*) AS n FROM clients WHERE revoked_at IS NULL "
            "AND (not_after IS NULL OR not_after > ?) GROUP BY role"
        )
        found = {
            row["role"]: int(row["n"]) for row in self.database.rows(sql, (self.database.now,))
        }
        return {role.value: found.get(role.value, 0) for role in Role}

    def _accuracy_of(self, run: RunRow | None, rounds: int) -> metrics.Metrics | None:
        if run is None:
            return None
        newest = self.database.number(
            "SELECT max(rowid) FROM evaluations WHERE run = ?", (run.run_id,)
        )
        key = (run.run_id, newest, rounds)
        if self._accuracy[0] != key:
            rows = self._evaluations.all(run.run_id)
            increments = [t.class_ids for t in self._tasks.all(run.run_id)]
            own = [r for r in rows if r.client != CENTRAL]
            self._accuracy = (key, metrics.compute(own or rows, increments))
        return self._accuracy[1]

    # --- sums over rounds ---------------------------------------------------------------------

    def _counts(self) -> Counts:
        total = Counts()
        sql = (
            "SELECT r.rowid AS id, r.run, r.seq "  # noqa: S608 - question marks alone
            "FROM rounds AS r JOIN runs ON runs.run_id = r.run "
            f"WHERE (r.rowid > ? OR r.rowid IN ({', '.join(['0', *'?' * len(self._open)])})) "
            "AND r.seq >= runs.inherited ORDER BY r.rowid"
        )
        for place in self.database.rows(sql, (self._past, *self._open)):
            row = self._reader.rounds.at(place["run"], place["seq"])
            one, closed = self._one_round(row), row.closed_at
            self._past = max(self._past, place["id"])
            if closed is not None and closed < self.database.now - SETTLED_S:
                self._settled.add(one)
                self._open.discard(place["id"])
            else:  # perhaps for ever: the last round of a run that was left
                total.add(one)
                self._open.add(place["id"])
        total.add(self._settled)
        for run in [None, *(r["run_id"] for r in self.database.rows("SELECT run_id FROM runs"))]:
            rest = no_round(run)
            self._add_bytes(total, rest, self._reader.bytes.by_cause(rest))
        return total

    def _named(self) -> dict[str, str]:
        sql = (
            "SELECT client_id, name FROM clients WHERE revoked_at IS NULL "
            "ORDER BY enrolled_at, rowid LIMIT ?"
        )
        return {r["client_id"]: r["name"] for r in self.database.rows(sql, (self._told_apart,))}

    def _one_round(self, row: RoundRow) -> Counts:
        found, kind, view = Counts(), row.kind, self._reader.view(row)
        found.reopened[kind] += row.reopened
        if row.outcome is not None and row.closed_at is not None:
            found.rounds[kind, row.outcome.value] += 1
            for phase, seconds in row.phases.items():
                found.seconds[kind, phase.removesuffix("_s")] += seconds
            for answer, _ in view.silent.values():
                found.answers[answer.value] += 1
        for status, updates in (
            ("accepted", view.senders),
            ("counted", view.counted),
            ("excluded", view.excluded),
            ("stale", view.stale),
        ):
            if updates:
                found.updates[kind, status] += len(updates)
        if self._told_apart:
            for client in view.counted:
                found.add_client(client, (1, 0, 0))
        self._add_bytes(found, row.key, view.flows)
        return found

    def _add_bytes(self, counts: Counts, place: Place, flows: Iterable[ByteCount]) -> None:
        for flow in flows:
            sizes = tuple(getattr(flow, level) for level in LEVELS)
            counts.add_flow((flow.direction, flow.cause, flow.source), sizes)
        if self._told_apart:
            for (client, way), (_, size) in self._reader.bytes.wire_of_clients(place).items():
                up = way is Direction.UP
                counts.add_client(client, (0, size if up else 0, 0 if up else size))
