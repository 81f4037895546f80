"""The ledger's data about one client: counts by index, and its newest rounds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger.byte_counts import ByteTable
from fcil_server.ledger.databases.database import Database, Row, build
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.rows import ByteCount, ClassRow, RoundRow
from fcil_server.reports.results.round_views import Bytes


@dataclass(frozen=True)
class ClientRound:
    """A round as one client saw it.

    Attributes:
        became: the client's result: the status of its update or its answer, or ``asked`` while
            nothing has come.
        reason: why, if there is a reason.
        flows: its bytes in this round.
    """

    round: RoundRow
    became: str
    reason: str
    flows: tuple[ByteCount, ...]

    @cached_property
    def up(self) -> Bytes:
        """Bytes that it sent."""
        return Bytes.total(f for f in self.flows if f.direction is Direction.UP)

    @cached_property
    def down(self) -> Bytes:
        """Bytes that it received."""
        return Bytes.total(f for f in self.flows if f.direction is Direction.DOWN)


class ClientReader:
    """A ledger reader for one client at a time; its cost grows with the client's rounds.

    Args:
        database: of an open ledger.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._bytes = ByteTable(database)

    def counted(self, client: ClientId) -> int:
        """Return the number of rounds of all runs that counted its update; copies count once."""
        sql = (
            "SELECT count(*) FROM runs CROSS JOIN updates AS u CROSS JOIN rounds AS r "
            "WHERE u.run = runs.run_id AND u.client = ? AND u.status = 'counted' AND "
            "(r.run, r.task, r.kind, r.round) = (u.run, u.task, u.kind, u.round) "
            "AND r.seq >= runs.inherited"
        )
        return int(self._db.number(sql, (client,)))

    def round_results(self, run: RunId, client: ClientId) -> dict[str, int]:
        """Return the client's results in a run's rounds, with their numbers."""
        found: defaultdict[str, int] = defaultdict(int)
        for table, word in (("updates", "status"), ("answers", "answer")):
            sql = (
                f"SELECT {word} AS word, count(*) AS n FROM {table} "  # noqa: S608 - ours
                f"WHERE run = ? AND client = ? GROUP BY {word}"
            )
            for row in self._db.rows(sql, (run, client)):
                found[row["word"]] += int(row["n"])
        return dict(found)

    def newest_rounds(self, run: RunId, client: ClientId, limit: int) -> list[ClientRound]:
        """Return the newest rounds that asked it, newest first."""
        sql = (
            "SELECT r.*, coalesce(u.status, a.answer, 'asked') AS became, "
            "coalesce(nullif(u.reason, ''), a.reason, '') AS because FROM rounds AS r "
            "LEFT JOIN updates AS u ON (u.run, u.client, u.task, u.kind, u.round) = "
            "(r.run, ?, r.task, r.kind, r.round) "
            "LEFT JOIN answers AS a ON (a.run, a.task, a.kind, a.round, a.client) = "
            "(r.run, r.task, r.kind, r.round, ?) WHERE r.run = ? AND (u.client IS NOT NULL "
            "OR a.client IS NOT NULL OR r.closed_at IS NULL AND instr(r.asked, ?) > 0) "
            "ORDER BY r.seq DESC LIMIT ?"
        )
        found = self._db.rows(sql, (client, client, run, f'"{client}"', limit))
        return [self._client_round(row, client) for row in found]

    def _client_round(self, row: Row, client: ClientId) -> ClientRound:
        one = build(RoundRow, row)
        flows = self._bytes.of_round(one.key, client)
        return ClientRound(one, row["became"], row["because"], tuple(flows))

    def counted_tasks_of(self, run: RunId, client: ClientId) -> set[int]:
        """Return the tasks of a run in which one of its updates was counted."""
        sql = (
            "SELECT DISTINCT task FROM updates WHERE run = ? AND client = ? AND status = 'counted'"
        )
        return {row["task"] for row in self._db.rows(sql, (run, client))}

    def first_brought_classes(self, run: RunId, client: ClientId, limit: int) -> list[ClassRow]:
        """Return the class names that it was the first to bring, in that order."""
        sql = "SELECT * FROM classes WHERE run = ? AND first_seen_by = ? ORDER BY seen_at LIMIT ?"
        return self._db.all(ClassRow, sql, (run, client, limit))
