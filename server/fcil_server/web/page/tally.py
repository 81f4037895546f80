"""A run's rounds as lines, and the sums of their bytes; final ones are kept.

A closed round's bytes may still be on their way to the ledger, so it is read again a few times as
it ages (`_AGAIN_S`), and then never more: the cost of reading does not grow with the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fcil_protocol.ids import ClientId, RunId
from fcil_server.reports.charts.history import RoundLine, round_line
from fcil_server.reports.results.round_views import RoundReader, Sums

# Ages of a closed round at which it is read again: counts come at its end and with each flush
# (`daemon.server.FLUSH_S`), at the latest when a full disk has room again.
_AGAIN_S = (6.0, 30.0, 120.0)

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

    rounds: tuple[RoundLine, ...] = ()
    open: RoundLine | None = None
    sums: Sums = field(default_factory=Sums)
    recent: frozenset[ClientId] = frozenset()
    unread: int = 0


class Tally:
    """Reads a run's rounds.

    Args:
        run: the run.
        reader: reads its rounds.
    """

    def __init__(self, run: RunId, reader: RoundReader) -> None:
        self._run = run
        self._reader = reader
        self._newest = -1  # by seq, of the known rounds
        self._unread: list[int] = []  # those of them that are not read yet, in order
        self._lines: dict[int, RoundLine] = {}  # by seq
        self._held: dict[int, _OpenRound] = {}  # by seq
        self._settled = Sums()
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
        new = self._reader.rounds.seqs_after(self._run, self._newest)
        again = {s for s, one in self._held.items() if _aged(one.line, now) > one.read}
        again |= {s for s in self._open() if s in self._held}
        for seq in again:
            self._take(seq, names, now)
        self._unread += new
        self._newest = new[-1] if new else self._newest
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
        held = [s for s, one in self._held.items() if one.line.closed_at is None]
        current = self._reader.rounds.current(self._run)
        return held if current is None else [*held, current.seq]

    def _told(self) -> Tallied:
        total = self._reader.rest(self._run)
        for sums in (self._settled, *(held.sums for held in self._held.values())):
            total.add(sums)
        lines = (held.line for held in self._held.values())
        under_way = next((line for line in lines if line.closed_at is None), None)
        recent = frozenset().union(*self._senders.values())
        return Tallied(
            rounds=self._rounds,
            open=under_way,
            sums=total,
            recent=recent,
            unread=len(self._unread),
        )

    def _take(self, seq: int, names: Mapping[ClientId, str], now: float) -> None:
        view = self._reader.view(self._reader.rounds.at(self._run, seq))
        line, sums = round_line(view, names), self._reader.sums(view)
        self._senders[seq] = frozenset(view.senders)
        self._senders.pop(min(self._senders) if len(self._senders) > RECENT else -1, None)
        self._lines[seq] = line
        aged = _aged(line, now)
        if aged == len(_AGAIN_S):
            self._settled.add(sums)
            self._held.pop(seq, None)
        else:
            self._held[seq] = _OpenRound(line, sums, aged)


def _aged(line: RoundLine, now: float) -> int:
    """Return the number of ages in `_AGAIN_S` that a round has reached; 0 for an open one."""
    if line.closed_at is None:
        return 0
    return sum(now - line.closed_at >= age for age in _AGAIN_S)
