"""One run as the dashboard and the reports show it; `page.reader.HistoryReader` reads it.

Compact and bounded: a round is one line for any number of clients; long lists of clients are cut,
with their full number next to them.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fcil_protocol.ids import ClientId, RoundKey
from fcil_server.ledger.enums import Cause, Direction, Outcome
from fcil_server.ledger.labels import ANSWERS
from fcil_server.ledger.rounds import Training
from fcil_server.ledger.rows import ByteCount, ClassRow, Event, RunRow, TaskRow
from fcil_server.ledger.tasks import StateResult
from fcil_server.reports.results.metrics import Measured, Metrics
from fcil_server.reports.results.round_views import CAUSES, Bytes, RoundView, Totals
from fcil_server.reports.results.run_data import RunData
from fcil_server.reports.traffic.paper_claims import PaperTraffic, paper_of

NAMED = 12  # clients of a round that are listed with name and reason
EXCLUDED = "left out"
UNNAMED = "federation"  # a federation that nobody has named is called so


@dataclass(frozen=True)
class Away:
    """A client whose update is missing from a round, and why."""

    client: ClientId
    name: str
    why: str


@dataclass(frozen=True)
class RoundLine:
    """One round in numbers.

    Attributes:
        asked, updates, counted: clients asked, updates received, updates in the new state.
        without: the first of the missing clients; ``left_out`` is their number.
        up, down: its bytes; ``up_by``, ``down_by``: of these the predicted wire bytes, in the order
            of `CAUSES`.
        training: loss and accuracy of its clients' training.
        tested: share of the server's test images that its state gets right; None: no test.
        stale: number of updates that start from an older state; ``oldest``: how many states older
            the oldest one.
    """

    key: RoundKey
    seq: int
    opened_at: float
    closed_at: float | None
    outcome: Outcome | None
    why: str
    reopened: int
    asked: int
    updates: int
    counted: int
    without: tuple[Away, ...]
    left_out: int
    phases: Mapping[str, float]
    up: Bytes
    down: Bytes
    up_by: tuple[int, ...]
    down_by: tuple[int, ...]
    training: Training = field(default_factory=Training)
    tested: float | None = None
    stale: int = 0
    oldest: int = 0

    def bytes_of(self, direction: Direction) -> Bytes:
        """Return its bytes in one direction."""
        return self.up if direction is Direction.UP else self.down


@dataclass(frozen=True)
class MemberLine:
    """A client as the dashboard lists it.

    Attributes:
        standing: ``member``, ``expired``, ``left``, ``revoked`` or ``erased``, by the ledger.
        rounds: of this run, in which its update counted.
        up, down: its bytes on the wire in this run.
        refused: number of its refused messages, of those the ledger still has.
        refusal, refused_at: the newest reason.
        recent: True if it took part in one of the newest rounds.
    """

    client: ClientId
    name: str
    role: str
    device: str
    enrolled_at: float
    last_seen: float | None
    rounds: int
    up: int
    down: int
    standing: str = ""
    via: str = ""
    why: str = ""
    refused: int = 0
    refusal: str = ""
    refused_at: float | None = None
    recent: bool = False


@dataclass(frozen=True)
class OpenTicket:
    """An unused ticket: its name, and the end of its lifetime (unix seconds)."""

    name: str
    expires_at: float


@dataclass(frozen=True)
class RunName:
    """A run of the federation, for choosing between them."""

    run: str
    method: str
    status: str


@dataclass(frozen=True)
class History(Measured):
    """One run at one moment.

    Attributes:
        version: grows with every visible change.
        rounds: closed ones, in order; ``open`` the one under way; ``unread`` the number of older
            ones that are still to be read, without which sums are too small.
        totals: the run's bytes by direction, and by direction and cause.
        outside: bytes of the federation that belong to no run.
        pooled, central: as in `RunData`.
        best: the best tested state.
        members: in the order of enrolment.
        tickets: the open ones, the newest first.
        events: the newest first; ``older`` is the number of further ones in the ledger.
        paper: the method's bytes by its paper.
        runs: of the federation, the newest first.
        frozen: True for a report, which no longer changes.
        marks: section -> the version of its last change.
    """

    version: int = 0
    run: RunRow | None = None
    tasks: tuple[TaskRow, ...] = ()
    classes: tuple[ClassRow, ...] = ()
    rounds: tuple[RoundLine, ...] = ()
    open: RoundLine | None = None
    unread: int = 0
    totals: Totals = field(default_factory=dict)
    outside: Mapping[Direction, Bytes] = field(default_factory=dict)
    pooled: Metrics | None = None
    central: Metrics | None = None
    best: StateResult | None = None
    members: tuple[MemberLine, ...] = ()
    tickets: tuple[OpenTicket, ...] = ()
    events: tuple[Event, ...] = ()
    older: int = 0
    paper: PaperTraffic = field(default_factory=PaperTraffic)
    runs: tuple[RunName, ...] = ()
    frozen: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)

    def changed(self, since: int) -> frozenset[str]:
        """Return the names of sections that may look different from those of version ``since``."""
        return frozenset(name for name, version in self.marks.items() if version > since)

    @cached_property
    def federation(self) -> str:
        """The name that the run's configuration gives the federation; empty if it gives none."""
        try:
            given = tomllib.loads(self.run.config if self.run else "")["federation"]["name"]
        except (tomllib.TOMLDecodeError, LookupError, TypeError):
            return ""
        return given if isinstance(given, str) and given != UNNAMED else ""

    @property
    def newer(self) -> str:
        """The newest run, if this is an older one; else empty."""
        newest = self.runs[0].run if self.runs else ""
        return newest if self.run is not None and newest != self.run.run_id else ""

    def bytes_of(self, direction: Direction, cause: Cause | None = None) -> Bytes:
        """Return the run's bytes in one direction, of one cause or of all."""
        return self.totals.get((direction, cause), Bytes())

    def name_of_class(self, number: int) -> str:
        """Return the name of a class."""
        return self._class_names.get(number, f"#{number}")

    @cached_property
    def _class_names(self) -> Mapping[int, str]:
        return {c.class_id: c.name for c in self.classes if c.class_id is not None}

    @property
    def seconds(self) -> float:
        """Seconds from the run's start to its last closed round."""
        if self.run is None or not self.rounds:
            return 0.0
        # A fork's first rounds are older than the run itself.
        ends = max(r.closed_at or 0.0 for r in self.rounds)
        return max(0.0, ends - self.run.created_at)


def frozen(data: RunData) -> History:
    """Return a run's history for a report."""
    clients = {c.client_id: c.name for c in data.clients.values()}
    return History(
        run=data.run,
        tasks=data.tasks,
        classes=data.classes,
        rounds=tuple(round_line(view, clients) for view in data.rounds),
        totals=data.sums.totals,
        outside=data.outside,
        pooled=data.pooled,
        central=data.central,
        best=data.best,
        members=tuple(_members(data)),
        events=data.events,
        paper=paper_of(data.run),
        frozen=True,
    )


def round_line(view: RoundView, names: Mapping[ClientId, str]) -> RoundLine:
    """Return a round in numbers; ``names`` are the clients'."""
    row = view.round
    without = [
        Away(c, names.get(c, c), ", ".join(filter(None, (ANSWERS[answer.value], why))))
        for c, (answer, why) in view.silent.items()
    ]
    without += [Away(c, names.get(c, c), f"{EXCLUDED}, {w}") for c, w in view.excluded.items()]
    return RoundLine(
        key=row.key,
        seq=row.seq,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        outcome=row.outcome,
        why=row.why,
        reopened=row.reopened,
        asked=len(row.asked),
        updates=view.updates,
        counted=len(view.counted),
        without=tuple(without[:NAMED]),
        left_out=len(without),
        phases=row.phases,
        up=view.up,
        down=view.down,
        up_by=_by_cause(view.flows, Direction.UP),
        down_by=_by_cause(view.flows, Direction.DOWN),
        training=view.training,
        tested=view.tested,
        stale=len(view.stale),
        oldest=max(view.stale.values(), default=0),
    )


def _by_cause(flows: Iterable[ByteCount], direction: Direction) -> tuple[int, ...]:
    """Return the predicted wire bytes of one round and direction, in the order of `CAUSES`."""
    found: Counter[Cause] = Counter()
    for flow in flows:
        if flow.direction is direction:
            found[flow.cause] += flow.wire
    return tuple(found[cause] for cause in CAUSES)


def _members(data: RunData) -> Iterable[MemberLine]:
    for row in data.clients.values():
        yield MemberLine(
            client=row.client_id,
            name=row.name,
            role=row.role.value,
            device=row.device,
            enrolled_at=row.enrolled_at,
            last_seen=row.last_seen,
            rounds=data.sums.counted[row.client_id],
            up=data.sums.sizes[row.client_id, Direction.UP],
            down=data.sums.sizes[row.client_id, Direction.DOWN],
        )
