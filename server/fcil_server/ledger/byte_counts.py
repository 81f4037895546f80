"""Traffic of the runs: bytes by round, client, direction, cause and source."""

from __future__ import annotations

from collections.abc import Iterable

from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.ledger.databases.database import Database, Row
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.rounds import OWN_ROUND
from fcil_server.ledger.rows import ByteCount

_ADD_BYTES = (
    "INSERT INTO bytes (run, task, kind, round, client, direction, cause, source, "
    "tensor, sealed, application, wire, retransmitted, link) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (ifnull(run, ''), ifnull(task, -1), ifnull(kind, ''), "
    "ifnull(round, -1), ifnull(client, ''), direction, cause, source) DO UPDATE SET "
    "tensor = bytes.tensor + excluded.tensor, sealed = bytes.sealed + excluded.sealed, "
    "application = bytes.application + excluded.application, wire = bytes.wire + excluded.wire, "
    "retransmitted = bytes.retransmitted + excluded.retransmitted, "
    "link = bytes.link + excluded.link"
)
_BOTH_WAYS = (
    "client, coalesce(sum(wire) FILTER (WHERE direction = 'up'), 0) AS up, "
    "coalesce(sum(wire) FILTER (WHERE direction = 'down'), 0) AS down"
)
_OF_CLIENTS = "client IS NOT NULL AND source = 'predicted' GROUP BY client"

_RECORDS = (
    "SELECT b.run, r.seq, b.task, b.kind, b.round, b.client, "
    "coalesce(c.name, b.client) AS client_name, b.direction, b.cause, b.source, "
    "b.tensor, b.sealed, b.application, b.wire, b.retransmitted, b.link FROM bytes AS b "
    "LEFT JOIN rounds AS r ON r.run = b.run AND r.task = b.task AND r.kind = b.kind "
    "AND r.round = b.round AND r.closed_at IS NOT NULL "
    "LEFT JOIN clients AS c ON c.client_id = b.client WHERE b.run = ? OR b.run IS NULL "
    "ORDER BY r.seq IS NULL, r.seq, b.run IS NULL, "
    "b.task NULLS FIRST, b.kind NULLS FIRST, b.round NULLS FIRST, b.client NULLS FIRST, "
    "b.direction, b.cause, b.source"
)

LEVELS = ("tensor", "sealed", "application", "wire", "retransmitted", "link")
SUMS = ", ".join(f"sum({level}) AS {level}" for level in LEVELS)  # of rows of table bytes
# Finds them by the index `bytes_key`: the run, task, kind and round that they belong to.
IN_INDEX = (
    "ifnull(run, '') = ? AND ifnull(task, -1) = ? AND ifnull(kind, '') = ? "
    "AND ifnull(round, -1) = ?"
)

Place = tuple[str, int, str, int]  # a round's key, or `no_round`
Share = tuple[ClientId, Direction]


def no_round(run: RunId | None) -> Place:
    """Return the place of bytes of a run, or of the federation, that belong to no round."""
    return (run or "", -1, "", -1)


class ByteTable:
    """Bytes of flows, growing. Table ``bytes``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, counts: Iterable[ByteCount]) -> None:
        """Add bytes to the counts of many flows.

        Predicted counts name their cause. Kernel counts (``source=KERNEL``) have the cause
        ``CONNECTION``: the growth of the connection's TCP payload since the last call
        (``wire``), with what was ``retransmitted`` and what it was on the ``link``. The two
        are shown side by side and never summed.
        """
        with self._db.transaction(durable=False):
            self._db.execute_each(_ADD_BYTES, [_values(count) for count in counts])

    def all(self, run: RunId | None) -> list[ByteCount]:
        """Return the counts of a run; with None those that belong to no run."""
        sql = (
            "SELECT * FROM bytes WHERE run IS ? "
            "ORDER BY task NULLS FIRST, kind NULLS FIRST, round NULLS FIRST, client NULLS FIRST, "
            "direction, cause, source"
        )
        return self._db.all(ByteCount, sql, (run,))

    def records(self, run: RunId) -> list[Row]:
        """Return a run's counts in order of its closed rounds; then those of no run.

        With each are its round's number (``seq``) and its client's name. The database joins and
        sorts them: Python takes five times as long for them, and there may be a million.
        """
        return self._db.rows(_RECORDS, (run,))

    def of_round(self, key: RoundKey, client: ClientId | None = None) -> list[ByteCount]:
        """Return the counts of one round, of all clients or of one.

        It goes through the index, however long the run is.
        """
        sql = f"SELECT * FROM bytes WHERE {IN_INDEX}"  # noqa: S608 - ours
        if client is None:
            return self._db.all(ByteCount, sql, key)
        return self._db.all(ByteCount, f"{sql} AND ifnull(client, '') = ?", (*key, client))

    def by_cause(self, place: Place) -> list[ByteCount]:
        """Return the counts of a place by direction, cause and source, all clients together."""
        sql = (
            "SELECT NULL AS run, NULL AS task, NULL AS kind, NULL AS round, NULL AS client, "  # noqa: S608
            f"direction, cause, source, {SUMS} FROM bytes WHERE {IN_INDEX} "
            "GROUP BY direction, cause, source"
        )
        return self._db.all(ByteCount, sql, place)

    def wire_of_clients(self, place: Place) -> dict[Share, tuple[int, int]]:
        """Return each client's wire bytes in a place: by the kernel's count, and predicted."""
        # In the order of the index, so that nothing is sorted.
        sql = (
            "SELECT ifnull(client, '') AS named, direction, "  # noqa: S608
            "coalesce(sum(wire) FILTER (WHERE source = 'kernel'), 0) AS kernel, "
            "coalesce(sum(wire) FILTER (WHERE source = 'predicted'), 0) AS predicted "
            f"FROM bytes WHERE {IN_INDEX} GROUP BY ifnull(client, ''), direction"
        )
        found = (row for row in self._db.rows(sql, place) if row["named"])
        return {(row[0], Direction(row[1])): (row[2], row[3]) for row in found}

    def by_client(self) -> dict[ClientId, tuple[int, int]]:
        """Return client -> predicted wire bytes up and down over all runs."""
        own = OWN_ROUND.format(table="bytes")
        sql = f"SELECT {_BOTH_WAYS} FROM bytes WHERE {own} AND {_OF_CLIENTS}"  # noqa: S608
        return {row["client"]: (row["up"], row["down"]) for row in self._db.rows(sql)}


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
