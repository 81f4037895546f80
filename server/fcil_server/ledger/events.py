"""Records: events, refused messages, and the audit log of operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.enums import HARMLESS
from fcil_server.ledger.rows import AuditEntry, Event, NewEvent, NewRefusal, RefusalRow

# Whoever sends garbage may not fill the disk, nor push out what others caused: of whoever has
# most rows the newest are kept, and all are counted.
KEPT_REFUSALS = 10_000
KEPT_EVENTS = 100_000
_TRIM_EVERY = 256
_TEXT_LIMIT = 2_000  # characters of a reason or an event that are stored


class EventTable:
    """Notes for the operator. Table ``events``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        level: str,
        code: str,
        text: str,
        *,
        run: RunId | None = None,
        client: ClientId | None = None,
    ) -> None:
        """Record something for the operator; level is ``info``, ``warning`` or ``error``."""
        self.add_all([NewEvent(self._db.now, level, run, client, code, text)])

    def newest(
        self,
        run: RunId | None = None,
        *,
        limit: int = 1_000,
        notable: bool = False,
    ) -> list[Event]:
        """Return the newest ``limit`` events, oldest first.

        Args:
            run: of this run; None: of all.
            limit: most events.
            notable: only warnings and errors.
        """
        sql = (
            "SELECT * FROM (SELECT * FROM events WHERE (? IS NULL OR run = ?) "
            "AND (NOT ? OR level <> 'info') ORDER BY id DESC LIMIT ?) AS newest ORDER BY id"
        )
        return self._db.all(Event, sql, (run, run, notable, limit))

    def after(self, after: int, *, limit: int, level: str | None = None) -> list[Event]:
        """Return the first ``limit`` events with id > ``after``, oldest first.

        Args:
            after: an event's id; 0: from the oldest on.
            limit: most events.
            level: only of this level; None: of all.
        """
        sql = "SELECT * FROM events WHERE id > ? AND (? IS NULL OR level = ?) ORDER BY id LIMIT ?"
        return self._db.all(Event, sql, (after, level, level, limit))

    def is_repeated(self, event: Event) -> bool:
        """Return True if the same was noted of its run before, and no round of it closed since."""
        sql = (
            "SELECT EXISTS (SELECT 1 FROM events AS e WHERE e.run = :run AND e.id < :id "
            "AND e.level = :level AND e.code = :code AND NOT EXISTS (SELECT 1 FROM rounds AS r "
            "WHERE r.run = e.run AND r.closed_at > e.at AND r.closed_at <= :at))"
        )
        names = ("run", "id", "level", "code", "at")
        return bool(self._db.number(sql, {name: getattr(event, name) for name in names}))

    def last_id(self) -> int:
        """Return the id of the newest event; 0: there is none."""
        return int(self._db.number("SELECT ifnull(max(id), 0) FROM events"))

    def add_all(
        self,
        events: Sequence[NewEvent],
        refusals: Sequence[NewRefusal] = (),
        refused: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Record many events and refusals in one commit.

        ``refused``: how many more messages were refused with each code. They may be more than
        ``refusals`` has rows: one row may stand for many that were alike.
        """
        with self._db.transaction(durable=False):
            self._db.execute_each(
                "INSERT INTO events (at, level, run, client, code, text) VALUES (?, ?, ?, ?, ?, ?)",
                [e._replace(text=e.text[:_TEXT_LIMIT]) for e in events],
            )
            self._db.execute_each(
                "INSERT INTO refusals (at, client, code, reason) VALUES (?, ?, ?, ?)",
                [r._replace(reason=r.reason[:_TEXT_LIMIT]) for r in refusals],
            )
            self._db.execute_each(
                "INSERT INTO refusal_counts VALUES (?, ?) "
                "ON CONFLICT (code) DO UPDATE SET count = refusal_counts.count + excluded.count",
                list(refused.items()),
            )
            self._trim("events", len(events), KEPT_EVENTS)
            self._trim("refusals", len(refusals), KEPT_REFUSALS)

    def _trim(self, table: str, added: int, kept: int) -> None:
        """Remove the oldest rows of the largest writers, once there are too many.

        Called after ``added`` rows were written. A twentieth more than must go is removed, so
        that the rows are not counted again each time.
        """
        newest = int(self._db.number(f"SELECT ifnull(max(id), 0) FROM {table}"))  # noqa: S608
        if newest // _TRIM_EVERY == (newest - added) // _TRIM_EVERY:
            return
        oldest = int(self._db.number(f"SELECT ifnull(min(id), 0) FROM {table}"))  # noqa: S608
        if newest - oldest < kept:
            return
        rows = self._db.rows(f"SELECT client, count(*) AS n FROM {table} GROUP BY client")  # noqa: S608
        held = {row["client"]: int(row["n"]) for row in rows}
        if sum(held.values()) <= kept:
            return
        most = even_share(held.values(), kept - kept // 20)
        for client, count in held.items():
            if count > most:
                self._db.execute(
                    f"DELETE FROM {table} WHERE id IN "  # noqa: S608
                    f"(SELECT id FROM {table} WHERE client IS ? ORDER BY id LIMIT ?)",
                    (client, count - most),
                )


class RefusalTable:
    """Refused messages. Tables ``refusals`` and ``refusal_counts``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, client: ClientId | None, code: str, reason: str) -> None:
        """Record a refused message; the newest are kept, all are counted by code."""
        refusal = NewRefusal(self._db.now, client, code, reason)
        EventTable(self._db).add_all([], [refusal], {code: 1})

    def newest(self, *, limit: int = 100) -> list[RefusalRow]:
        """Return the newest refusals, newest first."""
        return self._db.all(RefusalRow, "SELECT * FROM refusals ORDER BY id DESC LIMIT ?", (limit,))

    def after(self, after: int, *, limit: int) -> list[RefusalRow]:
        """Return the first ``limit`` refusals with id > ``after``, oldest first, no harmless."""
        sql = (
            f"SELECT * FROM refusals WHERE id > ? AND code NOT IN {HARMLESS} "  # noqa: S608
            "ORDER BY id LIMIT ?"
        )
        return self._db.all(RefusalRow, sql, (after, limit))

    def last_id(self) -> int:
        """Return the id of the newest refusal; 0: there is none."""
        return int(self._db.number("SELECT ifnull(max(id), 0) FROM refusals"))

    def of_client(self, client: ClientId, *, limit: int) -> list[RefusalRow]:
        """Return the newest refusals of one client's messages, newest first, but the harmless."""
        sql = (
            f"SELECT * FROM refusals WHERE client = ? AND code NOT IN {HARMLESS} "  # noqa: S608
            "ORDER BY id DESC LIMIT ?"
        )
        return self._db.all(RefusalRow, sql, (client, limit))

    def counts(self) -> dict[str, int]:
        """Return code -> how many messages were ever refused with it."""
        rows = self._db.rows("SELECT code, count FROM refusal_counts ORDER BY code")
        return {row["code"]: row["count"] for row in rows}


class AuditTable:
    """Operator actions; the database refuses to change them. Table ``audit``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, actor: str, action: str, detail: str = "") -> None:
        """Record an operator action; it can never be changed or removed."""
        self._db.insert(
            "audit", {"at": self._db.now, "actor": actor, "action": action, "detail": detail}
        )

    def count(self) -> int:
        """Return the number of operator actions."""
        return int(self._db.number("SELECT count(*) FROM audit"))

    def newest(self, *, limit: int = 1_000) -> list[AuditEntry]:
        """Return the newest operator actions, oldest first."""
        sql = "SELECT * FROM (SELECT * FROM audit ORDER BY id DESC LIMIT ?) AS newest ORDER BY id"
        return self._db.all(AuditEntry, sql, (limit,))


def even_share(held: Iterable[int], room: int) -> int:
    """Return the number of rows that each may keep so that all have at most ``room`` together.

    A writer with fewer rows keeps all of them, and the others share the rest: the writer of
    most loses most, and no writer's rows displace another's.
    """
    counts = sorted(held)
    for number, count in enumerate(counts):
        share = room // (len(counts) - number)
        if count > share:
            return max(1, share)
        room -= count
    return max(counts, default=0)
