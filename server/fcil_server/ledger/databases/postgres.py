"""The open ledger in Postgres.

A ledger of an older version is brought up to date by the scripts for SQLite: it goes through a
temporary database and back, in one transaction. So each script is written once.

A server claims the ledger with an advisory lock of the connection that it writes with. Postgres
releases the lock with that connection, and the server cannot commit without it: two servers never
both acknowledge updates, even if one of them was stopped for an hour in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from fcil_protocol.errors import (
    CommitUnknown,
    FcilError,
    InternalError,
    Locked,
    StorageError,
    UsageError,
)
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.ledger.databases import sqlite_errors
from fcil_server.ledger.databases.database import Args, Database, Row, changed_table
from fcil_server.ledger.databases.location import Location
from fcil_server.ledger.databases.postgres_connection import (
    Connection,
    arguments,
    connect,
    named_errors,
    translated,
)
from fcil_server.ledger.databases.postgres_tables import (
    WRITE_TO_LOG,
    columns_of,
    drop_schema,
    dump,
    holds_ledger,
    load,
)
from fcil_server.ledger.databases.schema import MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.databases.sqlite import open_file

_DROP_TIMEOUT_MS = 10_000  # others may be reading
_LOOK_S = 2  # for Postgres to answer a command that needs no more than a hint
_BATCH = 500  # statements that are sent at once


class PostgresDatabase(Database):
    """One open ledger in Postgres.

    Raises:
        StorageError: it cannot be reached, there is none, or a newer fcil has written it.
    """

    def __init__(
        self,
        path: Path,
        location: Location,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path, read_only=read_only, clock=clock)
        self._location = location
        self.place = str(location)
        self._syncing: Connection | None = None
        self._sync_lock = threading.Lock()
        self._unsynced: FcilError | None = None
        with self._errors():
            self._db = connect(location, read_only=read_only)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; open transactions are rolled back, and a claim ends."""
        # Postgres notices the end of a connection a moment later.
        if not self.read_only:
            with contextlib.suppress(psycopg.Error):
                self._db.rollback()
                self._db.execute("SELECT pg_advisory_unlock_all()")
        with self._sync_lock:
            if self._syncing is not None:
                self._syncing.close()
            self._syncing = None
        self._db.close()

    # --- statements -------------------------------------------------------------------------------

    def rows(self, sql: str, args: Args = ()) -> list[Row]:
        """Return the rows of a query."""
        with self._errors():
            return self._db.execute(translated(sql), arguments(args)).fetchall()

    def number(self, sql: str, args: Args = ()) -> Any:
        """Return the first column of the first row, None when there is no row."""
        with self._errors():
            row = self._db.execute(translated(sql), arguments(args)).fetchone()
        return None if row is None else row[0]

    def execute(self, sql: str, args: Args = ()) -> int:
        """Execute one statement within the transaction that is open; return the rows it changed."""
        self._changes[changed_table(sql)] += 1
        with self._errors():
            return self._db.execute(translated(sql), arguments(args)).rowcount

    def execute_each(self, sql: str, rows: Sequence[Args]) -> None:
        """Execute one statement for each of the rows."""
        self._changes[changed_table(sql)] += 1
        sql = translated(sql)
        with self._errors(), psycopg.ClientCursor(self._db) as cursor:
            for at in range(0, len(rows), _BATCH):
                whole = [cursor.mogrify(sql, arguments(row)) for row in rows[at : at + _BATCH]]
                self._db.execute("; ".join(whole))

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns, in their order."""
        with self._errors():
            return columns_of(self._db, table)

    def changes(self) -> object:
        """Return a value that differs from before once a transaction that writes has ended."""
        return self.number("SELECT pg_current_snapshot()::text")

    def identity(self) -> object:
        """Return a value that differs if another ledger takes this one's place."""
        schema = self.number("SELECT ?::regnamespace::oid", (self._location.schema,))
        return self._location, schema

    def size_bytes(self) -> int:
        """Return how much room the tables and their indexes take."""
        sql = (
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
            "WHERE relkind = 'r' AND relnamespace = ?::regnamespace"
        )
        return int(self.number(sql, (self._location.schema,)))

    # --- transactions -----------------------------------------------------------------------------

    @property
    def in_transaction(self) -> bool:
        """True within a transaction, also one that can only be undone after an error."""
        states = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        return not self._db.closed and self._db.info.transaction_status in states

    def _refuse_ended(self) -> None:
        # Postgres answers the COMMIT of a transaction with an error in it by undoing it.
        if self._db.info.transaction_status == TransactionStatus.INERROR:
            raise InternalError(f"a transaction of {self.place} continued after an error.")
        super()._refuse_ended()

    def _begin(self, *, waits: bool) -> None:
        self.execute(f"BEGIN; SET LOCAL synchronous_commit = {'on' if waits else 'off'}")

    def _commit(self) -> object:
        try:
            return super()._commit()
        except FcilError as error:
            if self._db.closed:
                raise CommitUnknown(
                    f"the connection to {self.place} was lost during a commit, which may hold or "
                    "not."
                ) from error
            raise

    def _begin_moment(self) -> None:
        self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def sync(self) -> None:
        """Return when everything committed so far is on the disk; for any thread.

        By a commit that waits, of a transaction that has only written a line of the log: the log is
        written in order.
        """
        if self._unsynced is not None:
            raise self._unsynced
        try:
            with self._sync_lock, self._errors():
                if self._syncing is None:
                    self._syncing = connect(self._location)
                self._syncing.execute(WRITE_TO_LOG)
        except FcilError as error:
            self._unsynced = error
            raise

    # --- the ledger as a whole --------------------------------------------------------------------

    def claim(self) -> None:
        """Become the one server that works on this ledger, until it is closed.

        Raises:
            Locked: another one is.
        """
        with self._errors():
            claim(self._db, self._location)
            if self._syncing is None:  # before the first write: a later Postgres lacks the log
                self._syncing = connect(self._location)

    def check_still_in_place(self) -> None:
        """Notice that the connection is lost, and the claim with it.

        Raises:
            StorageError: it is.
        """
        self.number("SELECT 1")

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the ledger as of now into an SQLite file, 0600."""
        with storage_errors("write", target):
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        opened = sqlite3.connect(target, isolation_level=None)
        with (
            contextlib.closing(opened) as file,
            self.moment(),
            self._errors(),
            sqlite_errors.named_errors(target),
        ):
            dump(self._db, file, self._version())

    def drop(self) -> None:
        """Remove the ledger from Postgres, with its schema."""
        with self._errors():
            self._db.execute(f"SET lock_timeout = {_DROP_TIMEOUT_MS}")
            drop_schema(self._db, self._location.schema)

    def _version(self) -> int:
        return int(self.number("SELECT version FROM fcil_ledger"))

    def _prepare(self) -> None:
        with self._errors():
            held = holds_ledger(self._db, self._location.schema)
        if not held:
            raise StorageError(
                f"there is no ledger at {self.place}.",
                action="Restore a backup into a new directory: fcil-server restore",
            )
        version = self._version()
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"the ledger at {self.place} was written by a newer fcil: expected version "
                f"{SCHEMA_VERSION} or older, got {version}.",
                action="Install that fcil again, or go back as docs/upgrades.md says.",
            )
        if version == SCHEMA_VERSION:
            return
        if self.read_only:
            raise StorageError(
                f"the ledger at {self.place} has version {version}, expected {SCHEMA_VERSION}.",
                action="Start the server once, which brings it up to date.",
            )
        self.claim()
        version = self._version()  # another server may have brought it up to date meanwhile
        if version == SCHEMA_VERSION:
            return
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as file:
            with self.moment(), self._errors():
                dump(self._db, file, version)
            for script in MIGRATIONS[version:]:
                file.executescript(script)
            file.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            with self._errors(), self._db.transaction():
                drop_schema(self._db, self._location.schema)
                load(self._db, file, self._location.schema)

    def _errors(self) -> AbstractContextManager[None]:
        """Raise what psycopg raises inside as one of our errors, with the ledger's place."""
        return named_errors(self.place)


def move_in(location: Location, ledger: Path, *, replace: bool) -> None:
    """Copy an SQLite ledger of the present version into Postgres, in one transaction.

    Args:
        location: where to.
        ledger: the file.
        replace: drop a ledger that is there.

    Raises:
        UsageError: there is one already. StorageError: Postgres cannot be reached, or refuses.
    """
    with (
        named_errors(str(location)),
        contextlib.closing(connect(location)) as db,
        contextlib.closing(open_file(ledger, read_only=True)) as file,
        sqlite_errors.named_errors(ledger),
    ):
        claim(db, location)
        (encoding,) = db.execute("SHOW server_encoding").fetchone() or ("",)
        if encoding != "UTF8":
            raise UsageError(
                f"the database at {location} has the encoding {encoding}, expected UTF8.",
                action="Make one for fcil: CREATE DATABASE fcil ENCODING 'UTF8' TEMPLATE template0",
            )
        with db.transaction():
            if holds_ledger(db, location.schema):
                if not replace:
                    raise UsageError(
                        f"there is a ledger at {location} already.",
                        action="If it is of an earlier move, give --replace; it is then dropped.",
                    )
                drop_schema(db, location.schema)
            load(db, file, location.schema)


def _lock_number(location: Location) -> int:
    return int.from_bytes(hashlib.sha256(location.schema.encode()).digest()[:8], signed=True)


def claim(db: Connection, location: Location) -> None:
    """Let a connection hold the lock of the one server that works on a ledger.

    Raises:
        Locked: another connection does.
    """
    row = db.execute("SELECT pg_try_advisory_lock(%s)", (_lock_number(location),)).fetchone()
    if row is None or not row[0]:
        raise Locked(
            f"a server on {_holder(db, location)[0] or 'another host'} works on the ledger at "
            f"{location}.",
            action="Stop it first, or give this command there.",
        )


def _holder(db: Connection, location: Location) -> tuple[str, bool]:
    """Return the host that holds the lock of a ledger, "" without one, and if it is this host."""
    high, low = divmod(_lock_number(location) % (1 << 64), 1 << 32)
    row = db.execute(
        "SELECT host(client_addr), client_addr IS NOT DISTINCT FROM inet_client_addr() "
        "FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE locktype = 'advisory' AND granted AND classid::bigint = %s "
        "AND objid::bigint = %s AND objsubid = 1 AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())",
        (high, low),
    ).fetchone()
    if row is None:
        return "", False
    return str(row[0] or "the host of Postgres"), bool(row[1])


def host_elsewhere(location: Location) -> str:
    """Return the other host whose server works on a ledger; "" without one.

    Raises:
        StorageError: Postgres does not say so in time.
    """
    with (
        named_errors(str(location)),
        contextlib.closing(connect(location, read_only=True, timeout_s=_LOOK_S)) as db,
    ):
        host, here = _holder(db, location)
    return "" if here else host
