"""The ledger as an SQLite file: opened safely, with a log, failing with a sentence.

Commits are durable with ``synchronous = FULL`` and a write-ahead log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fcil_protocol.errors import CorruptFile, StorageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_data
from fcil_server.ledger.databases.database import Args, Database, Row, changed_table
from fcil_server.ledger.databases.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.databases.sqlite_errors import BUSY_S, damaged, named_errors

LEDGER_NAME = "ledger.sqlite"  # in the federation's directory
_LONG_LOG = 250  # commits after which the log is worth bringing into the file: 4 MB or so
KEPT_LOG_BYTES = 4 << 20  # to which a log that begins anew is cut
MOST_LOG_BYTES = 32 << 20  # beyond it, the log is emptied even if somebody is writing
_TRIES = 5  # to find a moment in which nobody writes, before that


class SqliteDatabase(Database):
    """One open ledger file: its connection, its transactions and its log.

    Used by one thread. The server writes; any number of readers open with ``read_only``
    while it runs or after. A reader of an older version reads a copy in memory, brought up to date;
    a writer brings the file up to date, and keeps a copy of it as it was (`older_name`).

    Raises:
        StorageError: no such file (read_only), not accessible, or written by a newer fcil.
        CorruptFile: not a ledger, or damaged.
        Locked: another process holds the write lock for too long.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path, read_only=read_only, clock=clock)
        self._unsynced: StorageError | None = None  # what the disk has lost for good
        self._commits = 0  # since the last checkpoint
        if read_only and not path.is_file():
            raise StorageError(
                f"there is no ledger at {path}.",
                action="Name the directory of a federation.",
            )
        if not read_only:
            _create_private(path)
        with named_errors(path):
            self._file = self._db = open_file(path, read_only=read_only)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        self._places = _inodes(path)

    def close(self) -> None:
        """Close the file; open transactions are rolled back."""
        self._db.close()
        self._file.close()

    @property
    def is_older(self) -> bool:
        """True if the file has an older version, which a writer would bring up to date."""
        return self._file is not self._db

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the ledger as of now, even if others write meanwhile.

        The copy is one file, 0600, without a log beside it, and has the version of the file.

        Raises:
            CorruptFile: the ledger is damaged.
        """
        _create_private(target)
        with named_errors(self.path):
            copy = sqlite3.connect(target, isolation_level=None)
            try:
                self._copy_into(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
            finally:
                copy.close()

    def refuse_damage(self) -> None:
        """Refuse a damaged file, also one whose indexes do not fit its tables.

        Later writes would be lost with it; and unique indexes keep an update from being
        counted twice. 0.3 s for 1000 rounds of 20 clients.

        Raises:
            CorruptFile: it is damaged.
        """
        with named_errors(self.path):
            [verdict] = self._file.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise damaged(self.path, verdict.splitlines()[-1])

    def check_still_in_place(self) -> None:
        """Refuse to go on with a file that is no longer where the next start looks for it.

        Raises:
            CorruptFile: the ledger or its log was removed or replaced while it was open.
        """
        now = _inodes(self.path)
        for path, inode in self._places.items():
            if now.get(path) != inode:
                raise CorruptFile(
                    f"{path} was removed or replaced while the server ran: anything that it "
                    "acknowledges from now on would be lost.",
                    action="Restore a backup into a new directory: fcil-server restore",
                )

    def empty_log(self) -> None:
        """Bring what the write-ahead log holds into the file, and leave the log empty."""
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def try_empty_log(self) -> bool:
        """Do as `empty_log`, for any thread; False if a reader still needs the log."""
        with named_errors(self.path), contextlib.closing(open_file(self.path)) as db:
            busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    def checkpoint_by_hand(self) -> None:
        """Let no commit bring the log into the file by itself: it would wait for the disk."""
        self.execute("PRAGMA wal_autocheckpoint = 0")
        self.execute(f"PRAGMA journal_size_limit = {KEPT_LOG_BYTES}")

    @property
    def long_log(self) -> bool:
        """True if a `checkpoint` is due."""
        if self._commits >= _LONG_LOG:
            return True
        return self._commits > 0 and self._log_bytes() > 2 * KEPT_LOG_BYTES

    def _log_bytes(self) -> int:
        try:
            return log_path(self.path).stat().st_size
        except OSError:  # gone: `check_still_in_place` says so
            return 0

    def checkpoint(self) -> None:
        """Copy the log into the file, so that it begins again; for any thread.

        SQLite restarts the log, and cuts it to `KEPT_LOG_BYTES`, with the first commit that
        finds all of it in the file. While others write, something is always left; so it is
        tried a few times, with less left each time. No commit waits for that. A log that is long
        all the same is emptied while commits wait: for the few pages that are left, and a sync.
        Readers are never waited for: while one needs the log, it stays as it is.
        """
        self._commits = 0
        with named_errors(self.path), contextlib.closing(open_file(self.path)) as db:
            for _ in range(_TRIES):
                _, pages, done = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if pages == done:
                    return
            if self._log_bytes() > MOST_LOG_BYTES:
                db.execute("PRAGMA busy_timeout = 0")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def sync(self) -> None:
        """Return when everything committed so far is on the disk; for any thread.

        What a checkpoint has taken out of the log meanwhile was synced by it.

        Raises:
            DiskFull, StorageError: what was committed since the last sync may be lost. Every
                later call raises the same: Linux tells of a lost write once, and the next sync
                would succeed without it.
        """
        if self._unsynced is not None:
            raise self._unsynced
        path = log_path(self.path)
        try:
            with storage_errors("sync", path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sync_data(fd)
                finally:
                    os.close(fd)
        except StorageError as error:
            self._unsynced = error
            raise

    def faults(self) -> list[str]:
        """Return what SQLite finds damaged or dangling in the file, a sentence each."""
        with named_errors(self.path):
            found = [str(row[0]) for row in self._file.execute("PRAGMA integrity_check(20)")]
            rows = self._file.execute("PRAGMA foreign_key_check").fetchall()
        dangling = {str(row["table"]) for row in rows}
        texts = [f"rows of {name} refer to rows that do not exist" for name in sorted(dangling)]
        return [text for text in found if text != "ok"] + texts

    # --- statements -------------------------------------------------------------------------------

    @property
    def in_transaction(self) -> bool:
        """True within a transaction that SQLite has not ended."""
        return self._db.in_transaction

    def _begin(self, *, waits: bool) -> None:
        self.execute(f"PRAGMA synchronous = {'FULL' if waits else 'NORMAL'}")
        self._commits += 1
        self.execute("BEGIN IMMEDIATE")

    def _begin_moment(self) -> None:
        self.execute("BEGIN")

    def execute(self, sql: str, args: Args = ()) -> int:
        """Execute one statement within the transaction that is open; return the rows it changed."""
        self._changes[changed_table(sql)] += 1
        with named_errors(self.path):
            return self._db.execute(sql, args).rowcount

    def execute_each(self, sql: str, rows: Sequence[Args]) -> None:
        """Execute one statement for each of the rows."""
        self._changes[changed_table(sql)] += 1
        with named_errors(self.path):
            self._db.executemany(sql, rows)

    def rows(self, sql: str, args: Args = ()) -> list[Row]:
        """Return the rows of a query."""
        with named_errors(self.path):
            return self._db.execute(sql, args).fetchall()

    def number(self, sql: str, args: Args = ()) -> Any:
        """Return the first column of the first row, None when there is no row."""
        with named_errors(self.path):
            row = self._db.execute(sql, args).fetchone()
        return None if row is None else row[0]

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns."""
        return [str(row["name"]) for row in self.rows(f"PRAGMA table_info({table})")]

    def changes(self) -> object:
        """Return a value that differs from before once another connection has committed."""
        return self.number("PRAGMA data_version")

    def identity(self) -> object:
        """Return a value that differs if another file takes this one's place."""
        return _inodes(self.path)[self.path]

    def size_bytes(self) -> int:
        """Return how much room the file and its log take."""
        paths = (self.path, log_path(self.path))
        return sum(path.stat().st_size for path in paths if path.exists())

    def overwrite_removed(self) -> None:
        """Overwrite removed rows with zeros from now on."""
        self.execute("PRAGMA secure_delete = ON")

    def _prepare(self) -> None:
        """Check owner and version, and bring an older or new file to this version."""
        version = int(self.number("PRAGMA user_version") or 0)
        owner = int(self.number("PRAGMA application_id") or 0)
        tables = int(self.number("SELECT count(*) FROM sqlite_master") or 0)
        if owner != APPLICATION_ID and (owner or version or tables):
            raise CorruptFile(
                f"{self.path} is a database, but not an fcil ledger.",
                action="Move it away, or name another federation directory.",
            )
        _check_version(self.path, version)
        if self.read_only:
            if version < SCHEMA_VERSION:
                self._read_updated_copy(version)
            return
        self.refuse_damage()
        self.execute("PRAGMA foreign_keys = ON")
        if self.number("PRAGMA journal_mode = WAL") != "wal":
            raise StorageError(
                f"{self.path} cannot use a write-ahead log on its file system.",
                action="Put the federation directory on a local disk.",
            )
        if version < SCHEMA_VERSION:
            if version:
                # The fcil that wrote it needs nothing else to continue.
                self.keep_as(self.path.with_name(older_name(version)))
            self._bring_up_to_date(version)

    def _bring_up_to_date(self, version: int) -> None:
        with named_errors(self.path):
            # One transaction: a kill leaves the old version or the new one.
            self._db.executescript(
                f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID};"
                f"{' '.join(MIGRATIONS[version:])} PRAGMA user_version = {SCHEMA_VERSION};"
                "COMMIT;"
            )

    def _copy_into(self, copy: sqlite3.Connection) -> None:
        """Copy the file as of one moment.

        Raises:
            Locked: another process holds the write lock for too long; `backup` would wait for ever.
        """
        began = not self._file.in_transaction
        if began:
            self._file.execute("BEGIN")
        try:
            self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            self._file.backup(copy)
        finally:
            if began:
                self._file.rollback()

    def _read_updated_copy(self, version: int) -> None:
        """Read an older ledger in this version without a change of its file."""
        if not version:
            raise StorageError(
                f"{self.path} is empty.",
                action="Start the server once, or restore a backup.",
            )
        copy = sqlite3.connect(":memory:", isolation_level=None)
        copy.row_factory = sqlite3.Row
        self._db = copy
        with named_errors(self.path):
            self._copy_into(copy)
            [version] = copy.execute("PRAGMA user_version").fetchone()  # a server may have begun
            self._bring_up_to_date(version)
            copy.execute("PRAGMA query_only = ON")


def _create_private(path: Path) -> None:
    """Make the file 0600 before SQLite opens it; its -wal and -shm files inherit the mode."""
    with storage_errors("open the ledger", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def refuse_newer(path: Path) -> None:
    """Refuse a ledger that a newer fcil has written; other faults are found when it is opened.

    Raises:
        StorageError: with both versions.
    """
    version = 0
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(open_file(path, read_only=True)) as db,
    ):
        [version] = db.execute("PRAGMA user_version").fetchone()
    _check_version(path, version)


def _check_version(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{path} was written by a newer fcil: expected ledger version {SCHEMA_VERSION} or "
            f"older, got {version}.",
            action="Install that fcil again, or go back as docs/upgrades.md says.",
        )


def remove_older(directory: Path) -> None:
    """Remove what upgrades and moves have kept of a ledger.

    Raises:
        StorageError: a file cannot be removed.
    """
    for path in older_copies(directory):
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)


def older_copies(directory: Path) -> list[Path]:
    """Return the files that upgrades and moves have kept of a ledger, logs included."""
    endings = ("", "-wal", "-shm")  # the last two of a move that was killed
    return sorted(p for end in endings for p in directory.glob(older_name("*") + end))


def older_name(version: int | str) -> str:
    """Return the name of the copy of a ledger that was brought up to date from this version."""
    return f"ledger.version-{version}.sqlite"


def log_path(ledger: Path) -> Path:
    """Return where SQLite keeps the write-ahead log of a ledger."""
    return ledger.with_name(f"{ledger.name}-wal")


def _inodes(ledger: Path) -> dict[Path, tuple[int, int]]:
    """Return which files bear the names of the ledger and its log."""
    found = {}
    for path in (ledger, log_path(ledger)):
        with contextlib.suppress(OSError):  # a name that is gone is what the caller looks for
            status = path.stat()
            found[path] = (status.st_dev, status.st_ino)
    return found


def open_file(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open an SQLite file that exists, with any characters in its name."""
    mode = "ro" if read_only else "rw"
    url = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    # Autocommit: transactions are ours to begin and to end.
    db = sqlite3.connect(url, uri=True, isolation_level=None, timeout=BUSY_S)
    db.row_factory = sqlite3.Row
    return db
