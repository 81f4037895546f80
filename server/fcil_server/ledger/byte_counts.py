"""The ledger's accounts: bytes, evaluations, events, refusals and the audit log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.ledger.database import LedgerFile
from fcil_server.ledger.enums import CENTRAL, HARMLESS
from fcil_server.ledger.rows import (
    AuditEntry,
    ByteCount,
    Evaluation,
    Event,
    NewEvent,
    NewRefusal,
    Refusal,
)

# Whoever sends garbage may not fill the disk, nor push out what others caused: of whoever has
# most rows the newest are kept, and all are counted.
KEPT_REFUSALS = 10_000
KEPT_EVENTS = 100_000
_TRIM_EVERY = 256
_ADD_BYTES = (
    "INSERT INTO bytes (run, task, kind, round, client, direction, cause, source, "
    "tensor, sealed, application, wire, retransmitted, link) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (ifnull(run, ''), ifnull(task, -1), ifnull(kind, ''), "
    "ifnull(round, -1), ifnull(client, ''), direction, cause, source) DO UPDATE SET "
    "tensor = tensor + excluded.tensor, sealed = sealed + excluded.sealed, "
    "application = application + excluded.application, wire = wire + excluded.wire, "
    "retransmitted = retransmitted + excluded.retransmitted, link = link + excluded.link"
)
_TEXT_LIMIT = 2_000  # characters of a reason or an event that are stored
# Not one of the rounds that a forked run copied from its parent.
_OWN_ROUND = (
    "NOT EXISTS (SELECT 1 FROM rounds AS r JOIN runs ON runs.run_id = r.run "
    "WHERE r.run = {table}.run AND r.task = {table}.task AND r.kind = {table}.kind "
    "AND r.round = {table}.round AND r.seq < runs.inherited)"
)
_COUNTED = "status = 'counted' GROUP BY client"
_BOTH_WAYS = (
    "client, sum(wire * (direction = 'up')) AS up, sum(wire * (direction = 'down')) AS down"
)
_OF_CLIENTS = "client IS NOT NULL AND source = 'predicted' GROUP BY client"

LEVELS = ("tensor", "sealed", "application", "wire", "retransmitted", "link")
SUMS = ", ".join(f"sum({level}) AS {level}" for level in LEVELS)  # of rows of table bytes
# Finds them by the index `bytes_key`: the run, task, kind and round that they belong to.
IN_INDEX = (
    "ifnull(run, '') = ? AND ifnull(task, -1) = ? AND ifnull(kind, '') = ? "
    "AND ifnull(round, -1) = ?"
)


class AccountTables(LedgerFile):
    """What it cost, how good it was, what happened, who did what."""

    def add_byte_counts(self, counts: Iterable[ByteCount]) -> None:
        """Add bytes to the counts of many flows.

        Predicted counts name their cause. Kernel counts (``source=KERNEL``) have the cause
        ``CONNECTION``: the growth of the connection's TCP payload since the last call
        (``wire``), with what was ``retransmitted`` and what it was on the ``link``. The two
        are shown side by side and never summed.
        """
        with self.transaction(durable=False):
            self._execute_each(_ADD_BYTES, [_values(count) for count in counts])

    def byte_counts(self, run: RunId | None) -> list[ByteCount]:
        """Return the counts of a run; with None those that belong to no run."""
        sql = (
            "SELECT * FROM bytes WHERE run IS ? "
            "ORDER BY task, kind, round, client, direction, cause, source"
        )
        return self._all(ByteCount, sql, (run,))

    def byte_counts_of(self, key: RoundKey) -> list[ByteCount]:
        """Return the counts of one round (through the index, however long the run is)."""
        sql = f"SELECT * FROM bytes WHERE {IN_INDEX}"  # noqa: S608 - ours
        return self._all(ByteCount, sql, key)

    def add_evaluation(
        self, run: RunId, task: int, client: str, counts: Mapping[int, tuple[int, int]]
    ) -> None:
        """Record one evaluator's test after a task; a repeated evaluation replaces the first.

        ``client`` is a ClientId or `enums.CENTRAL`; ``counts`` maps class ids to
        (correct, total).
        """
        with self.transaction():
            self._execute(
                "DELETE FROM evaluations WHERE run = ? AND task = ? AND client = ?",
                (run, task, client),
            )
            for class_id, (correct, total) in counts.items():
                self._execute(
                    "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
                    (run, task, client, class_id, correct, total),
                )

    def evaluations(self, run: RunId) -> list[Evaluation]:
        """Return all evaluation counts of a run."""
        sql = "SELECT * FROM evaluations WHERE run = ? ORDER BY task, client, class_id"
        return self._all(Evaluation, sql, (run,))

    def evaluated(self, run: RunId, since: int, *, central: bool) -> list[int]:
        """Return the tasks from ``since`` on that were evaluated: centrally, or by clients."""
        sql = (
            "SELECT task FROM tasks WHERE run = ? AND task >= ? AND EXISTS (SELECT 1 FROM "
            "evaluations e WHERE e.run = tasks.run AND e.task = tasks.task AND "
        )
        sql += f"e.client {'=' if central else '<>'} ?) ORDER BY task"
        return [int(row["task"]) for row in self._rows(sql, (run, since, CENTRAL))]

    def add_event(
        self,
        level: str,
        code: str,
        text: str,
        *,
        run: RunId | None = None,
        client: ClientId | None = None,
    ) -> None:
        """Record something for the operator; level is ``info``, ``warning`` or ``error``."""
        self.add_notes([NewEvent(self.now, level, run, client, code, text)])

    def events(
        self, run: RunId | None = None, *, after: int = 0, limit: int = 1_000
    ) -> list[Event]:
        """Return the newest ``limit`` events with id > ``after``, oldest first."""
        sql = (
            "SELECT * FROM (SELECT * FROM events WHERE id > ? AND (? IS NULL OR run = ?) "
            "ORDER BY id DESC LIMIT ?) ORDER BY id"
        )
        return self._all(Event, sql, (after, run, run, limit))

    def add_refusal(self, client: ClientId | None, code: str, reason: str) -> None:
        """Record a refused message; the newest are kept, all are counted by code."""
        self.add_notes([], [NewRefusal(self.now, client, code, reason)], {code: 1})

    def add_notes(
        self,
        events: Sequence[NewEvent],
        refusals: Sequence[NewRefusal] = (),
        refused: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Record many events and refusals in one commit.

        ``refused``: how many more messages were refused with each code. They may be more than
        ``refusals`` has rows: one row may stand for many that were alike.
        """
        with self.transaction(durable=False):
            self._execute_each(
                "INSERT INTO events (at, level, run, client, code, text) VALUES (?, ?, ?, ?, ?, ?)",
                [e._replace(text=e.text[:_TEXT_LIMIT]) for e in events],
            )
            self._execute_each(
                "INSERT INTO refusals (at, client, code, reason) VALUES (?, ?, ?, ?)",
                [r._replace(reason=r.reason[:_TEXT_LIMIT]) for r in refusals],
            )
            self._execute_each(
                "INSERT INTO refusal_counts VALUES (?, ?) "
                "ON CONFLICT (code) DO UPDATE SET count = count + excluded.count",
                list(refused.items()),
            )
            self._trim("events", len(events), KEPT_EVENTS)
            self._trim("refusals", len(refusals), KEPT_REFUSALS)

    def refusals(self, *, limit: int = 100) -> list[Refusal]:
        """Return the newest refusals, newest first."""
        return self._all(Refusal, "SELECT * FROM refusals ORDER BY id DESC LIMIT ?", (limit,))

    def refusals_of(self, client: ClientId, *, limit: int) -> list[Refusal]:
        """Return the newest refusals of one client's messages, newest first, but the harmless."""
        sql = (
            f"SELECT * FROM refusals WHERE client = ? AND code NOT IN {HARMLESS} "  # noqa: S608
            "ORDER BY id DESC LIMIT ?"
        )
        return self._all(Refusal, sql, (client, limit))

    def rounds_by_client(self) -> dict[ClientId, int]:
        """Return client -> in how many rounds of all runs its update was counted.

        What a forked run copied from its parent counts once.
        """
        own = _OWN_ROUND.format(table="updates")
        sql = f"SELECT client, count(*) AS n FROM updates WHERE {own} AND {_COUNTED}"  # noqa: S608
        return {row["client"]: row["n"] for row in self._rows(sql)}

    def bytes_by_client(self) -> dict[ClientId, tuple[int, int]]:
        """Return client -> predicted wire bytes up and down over all runs."""
        own = _OWN_ROUND.format(table="bytes")
        sql = f"SELECT {_BOTH_WAYS} FROM bytes WHERE {own} AND {_OF_CLIENTS}"  # noqa: S608
        return {row["client"]: (row["up"], row["down"]) for row in self._rows(sql)}

    def refusal_counts(self) -> dict[str, int]:
        """Return code -> how many messages were ever refused with it."""
        rows = self._rows("SELECT code, count FROM refusal_counts ORDER BY code")
        return {row["code"]: row["count"] for row in rows}

    def add_audit(self, actor: str, action: str, detail: str = "") -> None:
        """Record an operator action; it can never be changed or removed."""
        self._insert("audit", {"at": self.now, "actor": actor, "action": action, "detail": detail})

    def audit(self, *, limit: int = 1_000) -> list[AuditEntry]:
        """Return the newest operator actions, oldest first."""
        sql = "SELECT * FROM (SELECT * FROM audit ORDER BY id DESC LIMIT ?) ORDER BY id"
        return self._all(AuditEntry, sql, (limit,))

    def _trim(self, table: str, added: int, kept: int) -> None:
        """Remove the oldest rows of whoever has most, once there are too many.

        Called after ``added`` rows were written. A twentieth more than must go is removed, so
        that the rows are not counted anew each time.
        """
        newest = int(self._number(f"SELECT ifnull(max(id), 0) FROM {table}"))  # noqa: S608
        if newest // _TRIM_EVERY == (newest - added) // _TRIM_EVERY:
            return
        oldest = int(self._number(f"SELECT ifnull(min(id), 0) FROM {table}"))  # noqa: S608
        if newest - oldest < kept:
            return
        rows = self._rows(f"SELECT client, count(*) AS n FROM {table} GROUP BY client")  # noqa: S608
        held = {row["client"]: int(row["n"]) for row in rows}
        if sum(held.values()) <= kept:
            return
        most = even_share(held.values(), kept - kept // 20)
        for client, count in held.items():
            if count > most:
                self._execute(
                    f"DELETE FROM {table} WHERE id IN "  # noqa: S608
                    f"(SELECT id FROM {table} WHERE client IS ? ORDER BY id LIMIT ?)",
                    (client, count - most),
                )


def even_share(held: Iterable[int], room: int) -> int:
    """Return how many rows each may keep so that all together have at most ``room``.

    Who has fewer keeps all of them, and what it leaves is shared by the others: so whoever
    writes most loses most, and nobody's rows are pushed out by somebody else's.
    """
    counts = sorted(held)
    for number, count in enumerate(counts):
        share = room // (len(counts) - number)
        if count > share:
            return max(1, share)
        room -= count
    return max(counts, default=0)


def _values(count: ByteCount) -> tuple[str | int | None, ...]:
    """Return a count in the order of `_ADD_BYTES`."""
    return (
        count.run,
        count.task,
        count.kind,
        count.round,
        count.client,
        count.direction.value,
        count.cause.value,
        count.source.value,
        count.tensor,
        count.sealed,
        count.application,
        count.wire,
        count.retransmitted,
        count.link,
    )
