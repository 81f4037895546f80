"""A run's rounds as lines, and the sums of their bytes; final ones are kept.

A closed round's bytes may still be on their way to the ledger, so it is read again a few times as
it ages (`_AGAIN_S`), and then never more: the cost of reading does not grow with the run.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any

from fcil_protocol.errors import CorruptFile
from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.ledger.byte_counts import IN_INDEX, LEVELS, SUMS
from fcil_server.ledger.enums import Cause, CountSource, Direction, Outcome, UpdateStatus
from fcil_server.ledger.labels import ANSWERS
from fcil_server.ledger.rounds import IN_ROUND
from fcil_server.ledger.rows import ByteCount
from fcil_server.reports.charts.history import EXCLUDED, NAMED, Away, RoundLine, Totals, by_cause
from fcil_server.reports.results.run_data import Bytes

# Ages of a closed round at which it is read again: counts come at its end and with each flush
# (`daemon.server.FLUSH_S`), at the latest when a full disk has room again.
_AGAIN_S = (6.0, 30.0, 120.0)

_COLUMNS = (
    "run, task, kind, round, seq, opened_at, closed_at, outcome, why, reopened, phases, "
    "json_array_length(asked) AS asked"
)
Place = tuple[str, int, str, int]
Rows = Callable[[str, Sequence[Any]], list[Row]]
Share = tuple[ClientId, Direction]


def no_round(run: RunId | None) -> Place:
    """Return the place of bytes of a run, or of the federation, that belong to no round."""
    return (run or "", -1, "", -1)


def counts(rows: Rows, place: Place) -> list[ByteCount]:
    """Return the bytes of a place by direction, cause and source, all clients together."""
    sql = (
        f"SELECT direction, cause, source, {SUMS} FROM bytes WHERE {IN_INDEX} "  # noqa: S608
        "GROUP BY direction, cause, source"
    )
    return [
        ByteCount(
            None, None, None, None, None,
            Direction(row["direction"]), Cause(row["cause"]), CountSource(row["source"]),
            *(int(row[level]) for level in LEVELS),
        )
        for row in rows(sql, place)
    ]  # fmt: skip


def of_place(found: Iterable[ByteCount]) -> dict[tuple[Direction, Cause | None], Bytes]:
    """Sum the counts of one place by direction, and by direction and cause."""
    groups: dict[tuple[Direction, Cause | None], list[ByteCount]] = {}
    for count in found:
        for cause in (None, count.cause):
            groups.setdefault((count.direction, cause), []).append(count)
    return {key: Bytes.of_one_place(group) for key, group in groups.items()}


@dataclass
class Sums:
    """Sums over rounds.

    Attributes:
        counted: client -> closed rounds in which its update counted.
        sizes: (client, direction) -> bytes on the wire.
    """

    totals: dict[tuple[Direction, Cause | None], Bytes]
    counted: Counter[ClientId]
    sizes: Counter[Share]

    @classmethod
    def none(cls) -> Sums:
        """Return empty sums."""
        return cls({}, Counter(), Counter())

    def add(self, other: Sums) -> None:
        """Add other sums to these."""
        for key, size in other.totals.items():
            self.totals[key] = self.totals.get(key, Bytes()) + size
        self.counted.update(other.counted)
        self.sizes.update(other.sizes)


RECENT = 3  # rounds; a client that took part in one of the newest and is away now is missed


@dataclass
class _OpenRound:
    """A round that is read again: open, or closed a short while ago."""

    line: RoundLine
    sums: Sums
    read: int  # number of ages in `_AGAIN_S` reached when it was read


@dataclass(frozen=True)
class Tallied:
    """A run's rounds at one moment.

    Attributes:
        recent: the clients of the newest (`RECENT`).
        unread: number of older rounds left for the next time.
    """

    rounds: tuple[RoundLine, ...]
    open: RoundLine | None
    totals: Totals
    counted: Mapping[ClientId, int]
    sizes: Mapping[Share, int]
    recent: frozenset[ClientId] = frozenset()
    unread: int = 0


class Tally:
    """Reads a run's rounds.

    Args:
        run: the run.
        rows: queries the ledger.
    """

    def __init__(self, run: RunId, rows: Rows) -> None:
        self._run = run
        self._rows = rows
        self._newest = -1  # by seq, of the known rounds
        self._unread: list[Row] = []  # those of them that are not read yet, in order
        self._lines: dict[int, RoundLine] = {}  # by seq
        self._held: dict[int, _OpenRound] = {}  # by seq
        self._settled = Sums.none()
        self._rounds: tuple[RoundLine, ...] = ()
        self._senders: dict[int, frozenset[ClientId]] = {}  # by seq, of the newest rounds

    def is_due(self, now: float) -> bool:
        """Return True if old or aged rounds remain to be read, even without a new write."""
        held = self._held.values()
        return bool(self._unread) or any(_aged(one.line, now) > one.read for one in held)

    def read(
        self, names: Mapping[ClientId, str], now: float, patience_s: float = math.inf
    ) -> Tallied:
        """Return the rounds as they are now.

        Args:
            names: the clients'.
            now: unix seconds.
            patience_s: after this many seconds the older rounds are left for the next time; one of
                them is always read.
        """
        until = time.monotonic() + patience_s
        sql = f"SELECT {_COLUMNS} FROM rounds WHERE run = ? AND seq > ? ORDER BY seq"  # noqa: S608
        new = self._rows(sql, (self._run, self._newest))
        again = {s for s, one in self._held.items() if _aged(one.line, now) > one.read}
        again |= {s for s in self._open() if s in self._held}
        for row in map(self._one, again):
            self._take(row, names, now)
        self._unread += new
        self._newest = new[-1]["seq"] if new else self._newest
        changed = bool(again or self._unread)
        while self._unread:
            self._take(self._unread.pop(), names, now)  # the newest of them
            if time.monotonic() >= until:
                break
        if changed:
            lines = (line for _, line in sorted(self._lines.items()))
            self._rounds = tuple(line for line in lines if line.closed_at is not None)
        return self._told()

    def reopened(self) -> bool:
        """Return True if a settled round is open again: then all rounds must be read again."""
        return any(s in self._lines and s not in self._held for s in self._open())

    def _open(self) -> list[int]:
        """Return the round under way, by seq; and any whose end is not read yet."""
        sql = "SELECT seq FROM rounds WHERE run = ? AND closed_at IS NULL"
        held = [s for s, one in self._held.items() if one.line.closed_at is None]
        return [*held, *(int(row["seq"]) for row in self._rows(sql, (self._run,)))]

    def _one(self, seq: int) -> Row:
        sql = f"SELECT {_COLUMNS} FROM rounds WHERE run = ? AND seq = ?"  # noqa: S608
        return self._rows(sql, (self._run, seq))[0]

    def _told(self) -> Tallied:
        total = Sums.none()
        total.add(self._settled)
        for held in self._held.values():
            total.add(held.sums)
        total.add(Sums(of_place(counts(self._rows, no_round(self._run))), Counter(), Counter()))
        total.sizes.update(self._sizes(no_round(self._run)))
        lines = (held.line for held in self._held.values())
        under_way = next((line for line in lines if line.closed_at is None), None)
        recent = frozenset().union(*self._senders.values())
        return Tallied(
            rounds=self._rounds,
            open=under_way,
            totals=total.totals,
            counted=total.counted,
            sizes=total.sizes,
            recent=recent,
            unread=len(self._unread),
        )

    def _take(self, row: Row, names: Mapping[ClientId, str], now: float) -> None:
        seq = int(row["seq"])
        line, sums = self._round(row, names)
        self._lines[seq] = line
        aged = _aged(line, now)
        if aged == len(_AGAIN_S):
            self._settled.add(sums)
            self._held.pop(seq, None)
        else:
            self._held[seq] = _OpenRound(line, sums, aged)

    def _round(self, row: Row, names: Mapping[ClientId, str]) -> tuple[RoundLine, Sums]:
        key = RoundKey(RunId(row["run"]), row["task"], row["kind"], row["round"])
        found = counts(self._rows, key)
        totals = of_place(found)
        sql = f"SELECT client, status, reason FROM updates WHERE {IN_ROUND} ORDER BY +client"  # noqa: S608
        updates = self._rows(sql, key)
        counted = [ClientId(u["client"]) for u in updates if u["status"] == UpdateStatus.COUNTED]
        self._senders[row["seq"]] = frozenset(ClientId(u["client"]) for u in updates)
        self._senders.pop(min(self._senders) if len(self._senders) > RECENT else -1, None)
        away = self._without(key, updates, names)
        closed = row["closed_at"]
        line = RoundLine(
            key=key,
            seq=row["seq"],
            opened_at=row["opened_at"],
            closed_at=closed,
            outcome=Outcome(row["outcome"]) if row["outcome"] else None,
            why=row["why"],
            reopened=row["reopened"],
            asked=row["asked"],
            updates=len(updates),
            counted=len(counted),
            without=tuple(away[:NAMED]),
            left_out=len(away),
            phases=_phases(row["phases"]),
            up=totals.get((Direction.UP, None), Bytes()),
            down=totals.get((Direction.DOWN, None), Bytes()),
            up_by=by_cause(found, Direction.UP),
            down_by=by_cause(found, Direction.DOWN),
        )
        kept = Counter(counted) if closed is not None else Counter[ClientId]()
        return line, Sums(totals, kept, Counter(self._sizes(key)))

    def _without(
        self, key: RoundKey, updates: Sequence[Row], names: Mapping[ClientId, str]
    ) -> list[Away]:
        sql = f"SELECT client, answer, reason FROM answers WHERE {IN_ROUND} ORDER BY client"  # noqa: S608
        told = [
            (row["client"], ", ".join(filter(None, (ANSWERS[row["answer"]], row["reason"]))))
            for row in self._rows(sql, key)
        ]
        told += [
            (row["client"], f"{EXCLUDED}, {row['reason']}")
            for row in updates
            if row["status"] == UpdateStatus.EXCLUDED
        ]
        return [Away(c, names.get(c, c), why) for c, why in told]

    def _sizes(self, place: Place) -> dict[Share, int]:
        """Return each client's bytes on the wire: the kernel's count if there is one."""
        # In the order of the index, so that nothing is sorted.
        sql = (
            "SELECT client, direction, sum(wire * (source = 'kernel')) AS kernel, "  # noqa: S608
            f"sum(wire * (source <> 'kernel')) AS predicted FROM bytes WHERE {IN_INDEX} "
            "GROUP BY ifnull(client, ''), direction"
        )
        found = self._rows(sql, place)
        return {(row[0], row[1]): row[2] or row[3] for row in found if row[0] is not None}


def _aged(line: RoundLine, now: float) -> int:
    """Return the number of ages in `_AGAIN_S` that a round has reached; 0 for an open one."""
    if line.closed_at is None:
        return 0
    return sum(now - line.closed_at >= age for age in _AGAIN_S)


def _phases(text: str) -> Mapping[str, float]:
    try:
        return {str(name): float(value) for name, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(
            "the ledger is damaged: column phases of table rounds cannot be read.",
            action="Stop the server and restore a backup into a new directory: fcil-server restore",
        ) from error
