"""News of a federation in order: notes, closed rounds, refused messages; each with a position.

A reader names the position that it has reached and gets what came after it, so it may be away, slow
or restarted; the ledger is the queue. The API's streams and the webhooks read it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from operator import itemgetter
from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import Event, RefusalRow, RunRow
from fcil_server.reports.results.round_views import RoundReader, RoundView

_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,15})\.([A-Za-z0-9-]{0,64})\.(-1|[0-9]{1,15})")


class NewsKind(StrEnum):
    """Kinds of news."""

    NOTE = "note"
    ROUND_CLOSED = "round_closed"
    TASK_LEARNED = "task_learned"
    RUN_DONE = "run_done"
    CLIENT_REFUSED = "client_refused"


# Notes that are news of a kind of their own, by level and code.
_NOTED = {
    ("info", "task_done"): NewsKind.TASK_LEARNED,
    ("info", "run_done"): NewsKind.RUN_DONE,
}


@dataclass(frozen=True)
class NewsPosition:
    """A place between two news items.

    Attributes:
        event, refusal: ids of the newest ones before it.
        run, seq: the newest closed round before it; seq -1: none of this run.
    """

    event: int = 0
    refusal: int = 0
    run: str = ""
    seq: int = -1

    def text(self) -> str:
        """Return it as text, for `parse`."""
        return f"{self.event}.{self.refusal}.{self.run}.{self.seq}"

    @classmethod
    def parse(cls, text: str) -> NewsPosition:
        """Read a position.

        Raises:
            UsageError: it is not a position.
        """
        found = _POSITION.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{ascii(text)[:60]} is not the id of an event.",
                action="Send the id of the last event that was received, as it was.",
            )
        return cls(int(found[1]), int(found[2]), found[3], int(found[4]))

    def within(self, newest: NewsPosition) -> NewsPosition:
        """Return it if a ledger whose newest place is this one can have it, and that one else.

        A restored ledger is older than places of before: the news until then would be missed.
        """
        beyond = self.event > newest.event or self.refusal > newest.refusal
        return newest if beyond else self

    def known_in(self, ledger: Ledger) -> NewsPosition:
        """Return it if this ledger can have given it, and else the place after all news."""
        known = not self.run or ledger.runs.get(RunId(self.run)) is not None
        newest = newest_position(ledger)
        return self.within(newest) if known else newest


@dataclass(frozen=True)
class NewsItem:
    """One piece of news.

    Attributes:
        data: plain; its moments are unix seconds.
        position: the place after it.
        key: names it among all news; its place between others may change.
    """

    kind: NewsKind
    data: dict[str, Any]
    position: NewsPosition
    key: str


Timed = Iterator[tuple[float, Event | RefusalRow | RoundView]]


def newest_position(ledger: Ledger) -> NewsPosition:
    """Return the place after all news so far."""
    run = ledger.runs.newest()
    closed = -1
    if run is not None:
        rows = ledger.rounds.newest(run.run_id, 2)  # at most one of them is open
        closed = max((r.seq for r in rows if r.closed_at is not None), default=-1)
    return NewsPosition(
        event=ledger.events.last_id(),
        refusal=ledger.refusals.last_id(),
        run="" if run is None else run.run_id,
        seq=closed,
    )


def news_after(ledger: Ledger, position: NewsPosition, limit: int) -> list[NewsItem]:
    """Return at most ``limit`` news after a position, in order of time."""
    notes: Timed = ((e.at, e) for e in ledger.events.after(position.event, limit=limit))
    refused: Timed = ((r.at, r) for r in ledger.refusals.after(position.refusal, limit=limit))
    rounds: Timed = ((v.round.closed_at or 0.0, v) for v in _closed(ledger, position, limit))
    found: list[NewsItem] = []
    for _, one in heapq.merge(notes, refused, rounds, key=itemgetter(0)):
        if len(found) >= limit:
            break
        item = _item(ledger, one, position)
        position = item.position
        found.append(item)
    return found


def _closed(ledger: Ledger, position: NewsPosition, limit: int) -> Iterator[RoundView]:
    """Yield closed rounds after a position, without those that a fork copied."""
    reader = RoundReader(ledger.database)
    for run, seq in _runs_from(ledger.runs.all(), position):
        for row in reader.rounds.all(run, seq, limit):
            if row.closed_at is not None:  # an abandoned run keeps its open round for good
                yield reader.view(row)


def _runs_from(runs: list[RunRow], position: NewsPosition) -> Iterator[tuple[RunId, int]]:
    """Yield each run from the position's on, with the first round to look at."""
    ids = [row.run_id for row in runs]
    at = ids.index(RunId(position.run)) if position.run in ids else -1
    if at >= 0:
        yield ids[at], position.seq + 1
    for row in runs[at + 1 :]:
        yield row.run_id, row.inherited


def _item(ledger: Ledger, one: Event | RefusalRow | RoundView, before: NewsPosition) -> NewsItem:
    match one:
        case Event():
            kind = _NOTED.get((one.level, one.code), NewsKind.NOTE)
            if kind is NewsKind.RUN_DONE and ledger.events.is_repeated(one):
                kind = NewsKind.NOTE  # a server that starts on a complete run notes it again
            data = asdict(one)
            if kind is NewsKind.TASK_LEARNED and one.run is not None:
                data |= _learned(ledger, one.run, one.at)
            return NewsItem(kind, data, replace(before, event=one.id), f"event {one.id}")
        case RefusalRow():
            position = replace(before, refusal=one.id)
            return NewsItem(NewsKind.CLIENT_REFUSED, asdict(one), position, f"refusal {one.id}")
    row = one.round
    data = {
        "run": row.run,
        "seq": row.seq,
        "task": row.task,
        "kind": row.kind,
        "round": row.round,
        "outcome": row.outcome.value if row.outcome else None,
        "closed_by": row.why,
        "opened_at": row.opened_at,
        "closed_at": row.closed_at,
        "new_state": row.new_state,
        "asked": len(row.asked),
        "counted": len(one.counted),
        "train_loss": one.training.loss,
        "train_accuracy": one.training.accuracy,
        "test_accuracy": one.tested,
    }
    position = replace(before, run=row.run, seq=row.seq)
    return NewsItem(NewsKind.ROUND_CLOSED, data, position, f"round {row.run} {row.seq}")


def _learned(ledger: Ledger, run: RunId, at: float) -> dict[str, Any]:
    """Return the task that a note is about, and its accuracy over all classes so far."""
    closed = [t for t in ledger.tasks.all(run) if t.closed_at is not None and t.closed_at <= at]
    if not closed:
        return {"task": None, "accuracy": None}
    task = max(closed, key=lambda row: row.task).task
    right, total = ledger.evaluations.totals(run, task)
    if not total:
        right, total = ledger.evaluations.totals(run, task, central=True)
    return {"task": task, "accuracy": right / total if total else None}
