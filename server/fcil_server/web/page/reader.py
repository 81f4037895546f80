"""Repeated reads of a run from the ledger for the dashboard, cheap and free for the server.

The ledger is opened read-only; a reader and the server never wait for each other. While nothing is
written, a read costs one number; otherwise, closed rounds are not read again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import ClientId, RunId
from fcil_server.federation.eligibility import former_state
from fcil_server.ledger.databases.database import Row
from fcil_server.ledger.enums import HARMLESS, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import Event, RunRow
from fcil_server.ledger.tasks import StateResult
from fcil_server.reports.charts.history import History, MemberLine, OpenTicket, RunName
from fcil_server.reports.results import metrics
from fcil_server.reports.results.metrics import Metrics
from fcil_server.reports.results.round_views import Bytes, RoundReader
from fcil_server.reports.traffic.paper_claims import PaperTraffic, paper_of
from fcil_server.web.page.tally import Tallied, Tally

__all__ = ["History", "HistoryReader"]

KEPT_EVENTS = 2_000  # the newest, for browsing
_KEPT_RUNS = 4  # runs whose data is remembered
_SHOWN_RUNS = 100  # the newest, to choose from

# Of any run, so that no search is needed; with its numbers, since a test repeated just after the
# first one gets the same row numbers.
_NEWEST_TEST = (
    "SELECT rowid AS number, correct, total FROM evaluations WHERE (run, task, client) = "
    "(SELECT run, task, client FROM evaluations ORDER BY rowid DESC LIMIT 1) ORDER BY rowid"
)

# Fields of a history that each section shows.
_SHOWS: Mapping[str, tuple[str, ...]] = {
    "head": ("run", "tasks", "rounds", "unread", "totals", "pooled", "central"),
    "now": ("run", "rounds", "open", "runs"),
    "clients": ("run", "members", "tickets", "runs"),
    "tasks": ("run", "tasks", "classes", "rounds"),
    "accuracy": ("run", "rounds", "unread", "pooled", "central", "best"),
    "training": ("run", "rounds"),
    "bytes": ("run", "tasks", "rounds", "totals", "outside"),
    "rounds": ("run", "rounds"),
    "seconds": ("run", "rounds"),
    "events": ("run", "events", "older"),
    "configuration": ("run",),
}


@dataclass
class _Known:
    """Remembered data of a run.

    Attributes:
        forgotten: erased or forgotten clients at the time of reading; with more, all is read again.
        tested: newest evaluation, and closed rounds, that the metrics are of.
        events, all_events: the newest events; their total number.
    """

    tally: Tally
    paper: PaperTraffic
    forgotten: object
    tested: object = None
    pooled: Metrics | None = None
    central: Metrics | None = None
    best: StateResult | None = None
    events: tuple[Event, ...] = ()
    all_events: int = 0
    history: History = field(default_factory=History)


class HistoryReader:
    """A reader of histories, for one thread.

    Args:
        path: of the ledger.
        patience_s: after this many seconds, `read` returns a partial result, and continues with the
            older rounds the next time.

    Attributes:
        database: the ledger's file, read-only.

    Raises:
        As `Ledger`.
    """

    def __init__(self, path: Path, *, patience_s: float = math.inf) -> None:
        self._ledger = Ledger(path, read_only=True)
        self.database = self._ledger.database
        self._rounds = RoundReader(self.database)
        self._patience_s = patience_s
        self._known: OrderedDict[RunId | None, _Known] = OrderedDict()
        self._written: dict[
            RunId | None, object
        ] = {}  # the ledger's `changes` at the time of reading
        self._newest: RunId | None = None
        self._looked: object = None  # the ledger's `changes` when the newest run was looked up
        self._refusals: tuple[object, Mapping[str, Row]] = (None, {})
        self._version = 0

    def close(self) -> None:
        """Close the ledger."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, run: RunId | None = None) -> History:
        """Return a run as it is now; by default the newest.

        Raises:
            UsageError: there is no such run.
            CorruptFile: the ledger is damaged.
        """
        written = self.database.changes()
        wanted = run or self._newest
        known = self._known.get(wanted)
        # An up-to-date run need not still be the newest.
        fresh = self._written.get(wanted) == written and (run or self._looked == written)
        if known is not None and fresh and not known.tally.is_due(self.database.now):
            return known.history
        with self.database.moment():
            row = self._run(run)
            if run is None:
                self._newest, self._looked = row.run_id if row else None, written
            return self._nothing(written) if row is None else self._read(row, written)

    def _run(self, run: RunId | None) -> RunRow | None:
        if run is None:
            return self._ledger.runs.newest()
        row = self._ledger.runs.get(run)
        if row is None:
            raise UsageError(
                f"there is no run {run[:40]!r} in this federation.",
                action="Choose one of those that the dashboard lists.",
            )
        return row

    def _nothing(self, written: object) -> History:
        """Return the history before the first run: members and events."""
        known = self._known_of(None)
        members = tuple(self._members(self._people(), {}, Tallied()))
        self._take_events(known, None)
        found = History(
            members=members,
            tickets=tuple(self._tickets()),
            events=known.events,
            older=self._older(known),
        )
        self._remember(None, known, written)
        return self._keep(known, found)

    def _read(self, run: RunRow, written: object) -> History:
        known = self._known_of(run)
        people = self._people()
        names = {ClientId(row["client_id"]): row["name"] for row in people}
        tallied = known.tally.read(names, self.database.now, self._patience_s)
        tasks = tuple(self._ledger.tasks.all(run.run_id))
        self._test(known, run.run_id, len(tallied.rounds), [t.class_ids for t in tasks])
        self._take_events(known, run.run_id)
        outside = self._rounds.rest(None).totals
        found = History(
            run=run,
            tasks=tasks,
            classes=tuple(self._ledger.classes.all(run.run_id)),
            rounds=tallied.rounds,
            open=tallied.open,
            unread=tallied.unread,
            totals=tallied.sums.totals,
            outside={d: outside.get((d, None), Bytes()) for d in Direction},
            pooled=known.pooled,
            central=known.central,
            best=known.best,
            members=tuple(self._members(people, names, tallied)),
            tickets=tuple(self._tickets()),
            events=known.events,
            older=self._older(known),
            paper=known.paper,
            runs=tuple(self._run_names()),
        )
        self._remember(run.run_id, known, written)
        return self._keep(known, found)

    def _known_of(self, run: RunRow | None) -> _Known:
        """Take out a run's remembered data, or start from scratch if it is no longer true."""
        name = run.run_id if run else None
        forgotten = (run and run.emptied_at, self._erased())
        known = self._known.pop(name, None)
        if known is None or known.forgotten != forgotten or known.tally.reopened():
            history = known.history if known else History()
            tally = Tally(name or RunId(""), self._rounds)
            paper = paper_of(run) if run else PaperTraffic()
            known = _Known(tally, paper, forgotten, history=history)
        return known

    def _erased(self) -> int:
        """Return the number of erased members: if it grows, everything with names is read again."""
        return int(self.database.number("SELECT count(*) FROM erased"))

    def _remember(self, run: RunId | None, known: _Known, written: object) -> None:
        """Keep complete data; data of a failed read is read from scratch the next time."""
        self._known[run] = known  # the last used one
        self._written[run] = written
        while len(self._known) > _KEPT_RUNS:
            gone, _ = self._known.popitem(last=False)
            self._written.pop(gone, None)

    def _keep(self, known: _Known, found: History) -> History:
        """Return the known history if nothing has changed, else this one as the next."""
        old = known.history
        fields = dict.fromkeys(name for names in _SHOWS.values() for name in names)
        other = {name for name in fields if getattr(old, name) != getattr(found, name)}
        if not other and old.version:
            return old
        self._version += 1
        marks = {
            name: self._version if not old.version or other.intersection(shown) else old.marks[name]
            for name, shown in _SHOWS.items()
        }
        known.history = replace(found, version=self._version, marks=marks)
        return known.history

    # --- read again each time -----------------------------------------------------------------

    def _run_names(self) -> Iterator[RunName]:
        sql = "SELECT run_id, method, status FROM runs ORDER BY rowid DESC LIMIT ?"
        for row in self.database.rows(sql, (_SHOWN_RUNS,)):
            yield RunName(row["run_id"], row["method"], row["status"])

    def _test(
        self, known: _Known, run: RunId, rounds: int, increments: Sequence[Sequence[int]]
    ) -> None:
        key = (*(tuple(row) for row in self.database.rows(_NEWEST_TEST)), rounds)
        if key != known.tested:
            rows = self._ledger.evaluations.all(run)
            known.pooled = metrics.pooled(rows, increments)
            known.central = metrics.central(rows, increments)
            known.best = self._ledger.evaluations.best(run)
            known.tested = key

    def _take_events(self, known: _Known, run: RunId | None) -> None:
        """Read the events of a run, and of none, that came since the last time."""
        ours = "(run IS NULL OR run = ?)"
        after = known.events[0].id if known.events else 0
        sql = f"SELECT * FROM events WHERE id > ? AND {ours} ORDER BY id DESC LIMIT ?"  # noqa: S608
        new = self.database.all(Event, sql, (after, run, KEPT_EVENTS))
        known.events = (*new, *known.events)[:KEPT_EVENTS]
        if new:
            count = f"SELECT count(*) FROM events WHERE id > ? AND {ours}"  # noqa: S608
            known.all_events += int(self.database.number(count, (after, run)))

    @staticmethod
    def _older(known: _Known) -> int:
        return known.all_events - len(known.events)

    def _tickets(self) -> Iterator[OpenTicket]:
        for ticket in self._ledger.tickets.all()[::-1]:
            if ticket.open_s(self.database.now):
                yield OpenTicket(ticket.name, ticket.expires_at)

    def _people(self) -> list[Row]:
        sql = (
            "SELECT client_id, name, length(curve) = 0 AS erased, enrolled_at, not_after, "
            "revoked_at, revoked_why, last_seen, device, role, via FROM clients "
            "ORDER BY enrolled_at, rowid"
        )
        return self.database.rows(sql)

    def _members(
        self, people: Sequence[Row], names: Mapping[ClientId, str], tallied: Tallied
    ) -> Iterator[MemberLine]:
        refusals, now = self._newest_refusals(), self.database.now
        for row in people:
            client = ClientId(row["client_id"])
            refused = refusals.get(client)
            yield MemberLine(
                client=client,
                name=row["name"],
                standing=_standing(row, now),
                role=row["role"],
                via=names.get(row["via"], "") if row["via"] else "",
                device=row["device"],
                enrolled_at=row["enrolled_at"],
                last_seen=row["last_seen"],
                why=row["revoked_why"],
                rounds=tallied.sums.counted[client],
                up=tallied.sums.sizes[client, Direction.UP],
                down=tallied.sums.sizes[client, Direction.DOWN],
                refused=refused["n"] if refused else 0,
                refusal=refused["reason"] if refused else "",
                refused_at=refused["at"] if refused else None,
                recent=client in tallied.recent,
            )

    def _newest_refusals(self) -> Mapping[str, Row]:
        """Return client -> its newest refusal, and the number of its refusals in the ledger."""
        key = (*self.database.rows("SELECT count(*), max(id) FROM refusals")[0], self._erased())
        if key != self._refusals[0]:
            sql = (
                "SELECT r.client, r.at, r.reason, newest.n FROM refusals AS r JOIN "  # noqa: S608
                "(SELECT max(id) AS id, count(*) AS n FROM refusals WHERE client IS NOT NULL "
                f"AND code NOT IN {HARMLESS} GROUP BY client) AS newest ON newest.id = r.id"
            )
            self._refusals = (key, {row["client"]: row for row in self.database.rows(sql)})
        return self._refusals[1]


def _standing(row: Row, now: float) -> str:
    away = row["revoked_at"] is not None
    if left := former_state(erased=bool(row["erased"]), revoked=away, why=row["revoked_why"] or ""):
        return left
    return "expired" if row["not_after"] is not None and row["not_after"] <= now else "member"
