"""Rounds read from the ledger: who took part, and their bytes.

Reports, the dashboard, the sinks and monitoring show or add up the `RoundView`s of one
`RoundReader`, so they cannot disagree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger.byte_counts import ByteTable, Place, Share, no_round
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.enums import Answer, Cause, CountSource, Direction, UpdateStatus
from fcil_server.ledger.rounds import AnswerTable, RoundTable, Training, UpdateTable
from fcil_server.ledger.rows import ByteCount, RoundRow

# Purposes of bytes on the wire, in the order in which charts stack them.
CAUSES = {
    Cause.UPDATE: "updates",
    Cause.BROADCAST: "broadcasts",
    Cause.CATCH_UP: "catch-up",
    Cause.CONTROL: "control",
    Cause.HANDSHAKE: "handshakes",
}
REST = "heartbeats and the rest"


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
        object_store: what clients fetched from an object store, as they say; in no other sum.
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
    object_store: int = 0

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
        wire = sum(c.wire for c in counts if c.source is CountSource.PREDICTED)
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
            object_store=sum(c.wire for c in counts if c.source is CountSource.REPORTED),
        )

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*map(int.__add__, _numbers(self), _numbers(other)))


_numbers = attrgetter(*(spec.name for spec in fields(Bytes)))  # astuple copies: 20 times slower


def sum_bytes(parts: Iterable[Bytes]) -> Bytes:
    """Add up the bytes of several rounds."""
    return sum(parts, start=Bytes())


Totals = Mapping[tuple[Direction, Cause | None], Bytes]


def by_direction(found: Iterable[ByteCount]) -> dict[tuple[Direction, Cause | None], Bytes]:
    """Sum the counts of one place by direction, and by direction and cause.

    The kernel counts a connection as a whole: beside the causes of its messages, its own cause has
    no bytes that are not in theirs.
    """
    groups: defaultdict[tuple[Direction, Cause | None], list[ByteCount]] = defaultdict(list)
    for count in found:
        for cause in (None, count.cause):
            groups[count.direction, cause].append(count)
    found_bytes = {key: Bytes.of_one_place(group) for key, group in groups.items()}
    return {
        (direction, cause): one if cause is None else replace(one, true_wire=one.wire, rest=0)
        for (direction, cause), one in found_bytes.items()
    }


@dataclass(frozen=True)
class RoundView:
    """One round with its participants and its cost.

    Attributes:
        senders: clients whose updates it has, counted or not.
        excluded: client -> reason.
        silent: client that was asked and sent no update -> its answer and reason.
        stale: client whose update starts from an older state -> how many states older.
        flows: its bytes by direction, cause and source, all clients together.
        training: of its updates, as their clients report it; ``trained`` by client.
    """

    round: RoundRow
    senders: tuple[ClientId, ...]
    counted: tuple[ClientId, ...]
    excluded: Mapping[ClientId, str]
    silent: Mapping[ClientId, tuple[Answer, str]]
    flows: tuple[ByteCount, ...]
    training: Training = field(default_factory=Training)
    trained: Mapping[ClientId, Training] = field(default_factory=dict)
    stale: Mapping[ClientId, int] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """The number of its updates, counted or not."""
        return len(self.senders)

    @cached_property
    def totals(self) -> Totals:
        """Its bytes by direction, and by direction and cause."""
        return by_direction(self.flows)

    @property
    def up(self) -> Bytes:
        """Bytes from the clients."""
        return self.totals.get((Direction.UP, None), Bytes())

    @property
    def down(self) -> Bytes:
        """Bytes to the clients."""
        return self.totals.get((Direction.DOWN, None), Bytes())

    @property
    def tested(self) -> float | None:
        """Share of the server's test images, 0 to 1, that its state gets right; None: no test."""
        found = self.round.metrics
        total = found.get("test_total")
        return found["test_correct"] / total if total else None

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
            "stale": dict(self.stale),
            "silent": {c: {"answer": a.value, "reason": r} for c, (a, r) in self.silent.items()},
            "seconds": dict(row.phases),
            "bytes": {"up": asdict(self.up), "down": asdict(self.down)},
            "metrics": dict(row.metrics),
            "test_accuracy": self.tested,
            "training": {
                **asdict(self.training),
                "clients": {c: asdict(one) for c, one in self.trained.items()},
            },
        }


@dataclass
class Sums:
    """Sums over rounds.

    Attributes:
        counted: client -> closed rounds in which its update counted.
        sizes: (client, direction) -> bytes on the wire.
    """

    totals: dict[tuple[Direction, Cause | None], Bytes] = field(default_factory=dict)
    counted: Counter[ClientId] = field(default_factory=Counter)
    sizes: Counter[Share] = field(default_factory=Counter)

    def add(self, other: Sums) -> None:
        """Add other sums to these."""
        for key, size in other.totals.items():
            self.totals[key] = self.totals.get(key, Bytes()) + size
        self.counted.update(other.counted)
        self.sizes.update(other.sizes)


class RoundReader:
    """A reader of rounds, at a cost that does not grow with the run.

    Args:
        database: of an open ledger.
    """

    def __init__(self, database: Database) -> None:
        self.rounds = RoundTable(database)
        self.bytes = ByteTable(database)
        self._updates = UpdateTable(database)
        self._answers = AnswerTable(database)

    def view(self, row: RoundRow) -> RoundView:
        """Read one round."""
        fates = self._updates.fates(row.key)
        return RoundView(
            round=row,
            senders=tuple(f.client for f in fates),
            counted=tuple(f.client for f in fates if f.status is UpdateStatus.COUNTED),
            excluded={f.client: f.reason for f in fates if f.status is UpdateStatus.EXCLUDED},
            silent={a.client: (a.answer, a.reason) for a in self._answers.of_round(row.key)},
            flows=tuple(self.bytes.by_cause(row.key)),
            training=Training.mean(fates),
            trained={
                f.client: Training(f.train_loss, f.train_accuracy)
                for f in fates
                if f.train_loss is not None
            },
            stale={
                f.client: row.base_state - f.base_state for f in fates if f.base_state is not None
            },
        )

    def sums(self, view: RoundView) -> Sums:
        """Return the sums of one round; of an open one no update has counted yet."""
        counted = view.counted if view.round.closed_at is not None else ()
        return Sums(dict(view.totals), Counter(counted), self._sizes(view.round.key))

    def rest(self, run: RunId | None) -> Sums:
        """Return the sums of a run, or of the federation, that belong to no round."""
        place = no_round(run)
        return Sums(by_direction(self.bytes.by_cause(place)), sizes=self._sizes(place))

    def _sizes(self, place: Place) -> Counter[Share]:
        found = self.bytes.wire_of_clients(place)
        return Counter({share: kernel or predicted for share, (kernel, predicted) in found.items()})
