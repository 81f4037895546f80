"""The ledger's SQLite file: opened safely, written in transactions, failing with a sentence.

Commits are durable (WAL, ``synchronous = FULL``) unless a caller says otherwise: every fact that an
Ack or a broadcast claims is on disk before it is sent. Rows without such a promise (events, byte
counts, last seen) commit without waiting for the disk; order is kept, so they become durable with
the next durable commit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

from fcil_protocol.errors import (
    CorruptFile,
    StorageError,
)
from fcil_protocol.storage.atomic_files import storage_errors, sync_data, sync_directory
from fcil_server.ledger.decoding import build
from fcil_server.ledger.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.sqlite_errors import BUSY_S, damaged, named_errors

T = TypeVar("T")
R = TypeVar("R")

LEDGER_NAME = "ledger.sqlite"  # in the federation's directory
_LONG_LOG = 250  # commits after which the log is worth bringing into the file: 4 MB or so
KEPT_LOG_BYTES = 4 << 20  # to which a log that begins anew is cut
MOST_LOG_BYTES = 32 << 20  # beyond it, the log is emptied even if somebody is writing
_TRIES = 5  # to find a moment in which nobody writes, before that
ANY_TABLE = "*"
MOST_REMEMBERED = 256  # readings; then all are forgotten
_CHANGE = re.compile(
    r"\s*(?:INSERT(?:\s+OR\s+\w+)?\s+INTO|UPDATE(?:\s+OR\s+\w+)?|DELETE\s+FROM)\s+\"?(\w+)",
    re.IGNORECASE,
)
_NO_CHANGE = re.compile(
    r"\s*(?:SELECT|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)\b", re.IGNORECASE
)

Value = str | int | float | bytes | None
Args = Sequence[Value] | Mapping[str, Value]


class Database:
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
        self.path = path
        self.read_only = read_only
        self.clock = clock
        self._depth = 0
        self._durable = False
        self._unsynced: StorageError | None = None  # what the disk has lost for good
        self._commits = 0  # since the last checkpoint
        self._changes = Counter[str]()  # statements by the table that they change
        self._remembered: dict[Hashable, tuple[tuple[int, ...], Any]] = {}
        if read_only and not path.is_file():
            raise StorageError(
                f"there is no ledger at {path}.",
                action="Name the directory of a federation.",
            )
        if not read_only:
            _create_private(path)
        with named_errors(path):
            self._file = self._db = _connect(path, read_only=read_only)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        with named_errors(self.path), contextlib.closing(_connect(self.path)) as db:
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
        with named_errors(self.path), contextlib.closing(_connect(self.path)) as db:
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

    @contextmanager
    def transaction(self, *, durable: bool = True, waits: bool = True) -> Iterator[None]:
        """Make everything inside atomic; on leaving it is committed, on an error undone.

        Transactions nest: an inner one that fails is undone alone if its error is caught.
        ``durable`` waits until the commit is on disk; needed before anything is said. Where it
        does not wait (``waits``), the caller lets `sync` follow before it says anything.

        Raises:
            StorageError: SQLite has ended it, or the one around it, after an earlier failure.
        """
        if self._depth:
            self._join(durable=durable)
            begin, commit = f"SAVEPOINT level{self._depth}", f"RELEASE level{self._depth}"
            undo = [f"ROLLBACK TO level{self._depth}", commit]
        else:
            now = durable and waits
            self.execute(f"PRAGMA synchronous = {'FULL' if now else 'NORMAL'}")
            self._durable = durable
            self._commits += 1
            begin, commit, undo = "BEGIN IMMEDIATE", "COMMIT", ["ROLLBACK"]
        self.execute(begin)
        self._depth += 1
        try:
            yield
            self._refuse_ended()
            self.execute(commit)
        except BaseException:
            # SQLite itself ends the transaction on some failures, such as a full disk.
            if self._db.in_transaction:
                for statement in undo:
                    self.execute(statement)
            raise
        finally:
            self._depth -= 1

    def _join(self, *, durable: bool) -> None:
        """Check that the transaction is still open, else SQLite would begin one of its own."""
        self._refuse_ended()
        assert self._durable or not durable, "a durable write in a transaction that is not"

    def _refuse_ended(self) -> None:
        """Refuse to go on in a transaction that SQLite has ended, on a full disk for instance."""
        if not self._db.in_transaction:
            raise StorageError(
                f"SQLite has ended a transaction of {self.path} after a failure.",
                action="The failure before says what to do.",
            )

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Let everything inside see the ledger as it is now; no writer waits for it."""
        if self._db.in_transaction:
            yield
            return
        self.execute("BEGIN")
        try:
            yield
        finally:
            self.execute("COMMIT")

    @property
    def in_durable(self) -> bool:
        """True if a durable transaction is open."""
        return self._depth > 0 and self._durable

    @property
    def now(self) -> float:
        """The ledger's clock, unix seconds."""
        return self.clock()

    def execute(self, sql: str, args: Args = ()) -> sqlite3.Cursor:
        """Execute one statement within the transaction that is open."""
        self._changes[changed_table(sql)] += 1
        with named_errors(self.path):
            return self._db.execute(sql, args)

    def execute_each(self, sql: str, rows: Sequence[Args]) -> None:
        """Execute one statement for each of the rows."""
        self._changes[changed_table(sql)] += 1
        with named_errors(self.path):
            self._db.executemany(sql, rows)

    def write(self, sql: str, args: Args = (), *, durable: bool = True) -> int:
        """Execute one changing statement, return how many rows it changed."""
        if self._depth:  # one statement is done or not, without a savepoint
            self._join(durable=durable)
            return self.execute(sql, args).rowcount
        with self.transaction(durable=durable):
            return self.execute(sql, args).rowcount

    def insert(self, table: str, values: dict[str, Value], *, durable: bool = True) -> None:
        """Insert one row: column -> value."""
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - names are ours
        self.write(sql, tuple(values.values()), durable=durable)

    def remember(self, name: Hashable, tables: Sequence[str], read: Callable[[], R]) -> R:
        """Return the result of a reading, which is repeated only once one of its tables changes.

        For readings of a few rows that every client's messages need. Nothing is remembered within a
        transaction, which may be undone, or in a file that others write.
        """
        if self.read_only or self._db.in_transaction:
            return read()
        stand = tuple(self._changes[table] for table in (*tables, ANY_TABLE))
        known = self._remembered.get(name)
        if known is not None and known[0] == stand:
            result: R = known[1]
            return result
        result = read()
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[name] = (stand, result)
        return result

    def all(self, cls: type[T], sql: str, args: Args = ()) -> list[T]:
        """Return the rows of a query as dataclasses."""
        return [build(cls, row) for row in self.rows(sql, args)]

    def rows(self, sql: str, args: Args = ()) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with named_errors(self.path):
            return self._db.execute(sql, args).fetchall()

    def one(self, cls: type[T], sql: str, args: Args = ()) -> T | None:
        """Return the first row of a query as a dataclass, None when there is no row."""
        rows = self.all(cls, sql, args)
        return rows[0] if rows else None

    def number(self, sql: str, args: Args = ()) -> Any:
        """Return the first column of the first row, None when there is no row."""
        with named_errors(self.path):
            row = self._db.execute(sql, args).fetchone()
        return None if row is None else row[0]

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
                self._keep_older(version)
            self._bring_up_to_date(version)

    def _bring_up_to_date(self, version: int) -> None:
        with named_errors(self.path):
            # One transaction: a kill leaves the old version or the new one.
            self._db.executescript(
                f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID};"
                f"{' '.join(MIGRATIONS[version:])} PRAGMA user_version = {SCHEMA_VERSION};"
                "COMMIT;"
            )

    def _keep_older(self, version: int) -> None:
        """Keep the file as it is: the fcil that wrote it needs nothing else to continue.

        Raises:
            DiskFull, StorageError: it cannot be kept; the ledger has its old version.
        """
        kept = self.path.with_name(older_name(version))
        # A name that the next process to lock the directory removes if a kill leaves the file.
        unfinished = kept.with_name(f".{kept.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        try:
            self.copy_to(unfinished)
            with storage_errors("keep the ledger of before as", kept):
                with unfinished.open("rb") as file:
                    sync_data(file.fileno())
                unfinished.replace(kept)
            sync_directory(kept.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

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


@functools.lru_cache(maxsize=512)
def changed_table(sql: str) -> str:
    """Return the table that a statement changes; `ANY_TABLE` if that is not clear, "" if none."""
    found = _CHANGE.match(sql)
    if found is not None:
        return found[1].lower()
    return "" if _NO_CHANGE.match(sql) else ANY_TABLE


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
        contextlib.closing(_connect(path, read_only=True)) as db,
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
    """Remove what upgrades have kept of a ledger.

    Raises:
        StorageError: a file cannot be removed.
    """
    for path in older_copies(directory):
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)


def older_copies(directory: Path) -> list[Path]:
    """Return the files that upgrades have kept of a ledger."""
    return sorted(directory.glob(older_name("*")))


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


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    mode = "ro" if read_only else "rw"
    url = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    # Autocommit: transactions are ours to begin and to end.
    db = sqlite3.connect(url, uri=True, isolation_level=None, timeout=BUSY_S)
    db.row_factory = sqlite3.Row
    return db
