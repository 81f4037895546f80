"""The ledger's database: its transactions, and what it remembers of readings.

Commits are durable unless a caller says otherwise: every fact that an Ack or a broadcast claims is
on disk before it is sent. Rows without such a promise (events, byte counts, last seen) commit
without waiting for the disk; order is kept, so they become durable with the next durable commit.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from fcil_protocol.errors import CorruptFile, StorageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_data, sync_directory

T = TypeVar("T")
R = TypeVar("R")

ANY_TABLE = "*"
MOST_REMEMBERED = 256  # readings; then all are forgotten
MOST_ROWS = (1 << 63) - 1  # where a statement needs a limit and there is none
_CHANGE = re.compile(
    r"\s*(?:INSERT(?:\s+OR\s+\w+)?\s+INTO|UPDATE(?:\s+OR\s+\w+)?|DELETE\s+FROM)\s+\"?(\w+)",
    re.IGNORECASE,
)
_NO_CHANGE = re.compile(
    r"\s*(?:SELECT|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)\b", re.IGNORECASE
)

Value = str | int | float | bytes | None
Args = Sequence[Value] | Mapping[str, Value]


class Row(Protocol):
    """A row of a query: its values by column name, or by position."""

    def __getitem__(self, key: int | str, /) -> Any:
        """Return one value."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the values in the order of the columns."""

    def keys(self) -> Sequence[str]:
        """Return the names of the columns."""


class Database(abc.ABC):
    """One open ledger: its connection and its transactions. Used by one thread.

    The server writes; any number of readers open with ``read_only`` while it runs or after.

    Attributes:
        path: of the ledger's file, or where it would be.
        place: where the ledger is, for sentences.
    """

    def __init__(
        self, path: Path, *, read_only: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.place = str(path)
        self.read_only = read_only
        self.clock = clock
        self._depth = 0
        self._durable = False
        self._changes = Counter[str]()  # statements by the table that they change
        self._remembered: dict[Hashable, tuple[tuple[int, ...], Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_older(self) -> bool:
        """True if a reader's ledger has an older version, which a writer would bring up to date."""
        return False

    @property
    def now(self) -> float:
        """The ledger's clock, unix seconds."""
        return self.clock()

    # --- what each kind of database does --------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Close the ledger; open transactions are rolled back."""

    @abc.abstractmethod
    def rows(self, sql: str, args: Args = ()) -> list[Row]:
        """Return the rows of a query."""

    @abc.abstractmethod
    def number(self, sql: str, args: Args = ()) -> Any:
        """Return the first column of the first row, None when there is no row."""

    @abc.abstractmethod
    def execute(self, sql: str, args: Args = ()) -> int:
        """Execute one statement within the transaction that is open; return the rows it changed."""

    @abc.abstractmethod
    def execute_each(self, sql: str, rows: Sequence[Args]) -> None:
        """Execute one statement for each of the rows."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Return when everything committed so far is on the disk; for any thread.

        Raises:
            DiskFull, StorageError: what was committed since the last sync may be lost. Every later
                call raises the same.
        """

    @abc.abstractmethod
    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the ledger as of now, even if others write meanwhile.

        The copy is an SQLite file, 0600, of the ledger's version, without a log beside it.

        Raises:
            CorruptFile: the ledger is damaged.
        """

    def keep_as(self, kept: Path) -> None:
        """Do as `copy_to` and wait for the disk; the name has a whole copy, or what it had before.

        Raises:
            DiskFull, StorageError: it cannot be written.
        """
        # A name that the next process to lock the directory removes if a kill leaves the file.
        unfinished = kept.with_name(f".{kept.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        try:
            self.copy_to(unfinished)
            with storage_errors("keep the ledger as", kept):
                with unfinished.open("rb") as file:
                    sync_data(file.fileno())
                unfinished.replace(kept)
            sync_directory(kept.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    @abc.abstractmethod
    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns."""

    @abc.abstractmethod
    def changes(self) -> object:
        """Return a value that differs from before once another connection has committed."""

    @abc.abstractmethod
    def identity(self) -> object:
        """Return a value that differs if another ledger takes this one's place."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Return how much room the ledger takes."""

    @property
    @abc.abstractmethod
    def in_transaction(self) -> bool:
        """True within a transaction that the database has not ended."""

    @abc.abstractmethod
    def _begin(self, *, waits: bool) -> None:
        """Begin a transaction whose commit waits for the disk, or does not."""

    @abc.abstractmethod
    def _begin_moment(self) -> None:
        """Begin a transaction that reads the ledger as of one moment."""

    # --- what only some have to do ----------------------------------------------------------------

    def claim(self) -> None:  # noqa: B027 - a file's directory has a lock of its own
        """Become the one server that works on this ledger, until it is closed.

        Raises:
            Locked: another one is.
        """

    def refuse_damage(self) -> None:  # noqa: B027
        """Refuse a damaged ledger, also one whose indexes do not fit its tables.

        Raises:
            CorruptFile: it is damaged.
        """

    def faults(self) -> list[str]:
        """Return a sentence for each fault: damage, or rows that refer to none."""
        return []

    def check_still_in_place(self) -> None:  # noqa: B027
        """Refuse to go on with a ledger that the next start would not find.

        Raises:
            CorruptFile: it was removed or replaced while it was open.
        """

    def overwrite_removed(self) -> None:  # noqa: B027
        """Overwrite removed rows from now on, where the database can."""

    def empty_log(self) -> None:  # noqa: B027
        """Bring what the write-ahead log holds into the file, and leave the log empty."""

    def try_empty_log(self) -> bool:
        """Do as `empty_log`, for any thread; False if a reader still needs the log."""
        return True

    def checkpoint_by_hand(self) -> None:  # noqa: B027
        """Let no commit bring the log into the file by itself: it would wait for the disk."""

    @property
    def long_log(self) -> bool:
        """True if a `checkpoint` is due."""
        return False

    def checkpoint(self) -> None:  # noqa: B027
        """Copy the log into the file, so that it begins again; for any thread."""

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, durable: bool = True, waits: bool = True) -> Iterator[None]:
        """Make everything inside atomic; on leaving it is committed, on an error undone.

        Transactions nest: an inner one that fails is undone alone if its error is caught.
        ``durable`` waits until the commit is on disk; needed before anything is said. Where it
        does not wait (``waits``), the caller lets `sync` follow before it says anything.

        Raises:
            StorageError: the database has ended it, or the one around it, after an earlier failure.
            CommitUnknown: the connection was lost as it was committed.
        """
        commit: Callable[[], object]
        if self._depth:
            self._join(durable=durable)
            level = f"level{self._depth}"
            commit = functools.partial(self.execute, f"RELEASE {level}")
            undo = [f"ROLLBACK TO {level}", f"RELEASE {level}"]
            self.execute(f"SAVEPOINT {level}")
        else:
            commit, undo = self._commit, ["ROLLBACK"]
            self._durable = durable
            self._begin(waits=durable and waits)
        self._depth += 1
        try:
            yield
            self._refuse_ended()
            commit()
        except BaseException:
            # The database itself ends the transaction on some failures, such as a full disk.
            if self.in_transaction:
                for statement in undo:
                    self.execute(statement)
            raise
        finally:
            self._depth -= 1

    def _commit(self) -> object:
        return self.execute("COMMIT")

    def _join(self, *, durable: bool) -> None:
        """Check that the transaction is still open, else a statement would begin one of its own."""
        self._refuse_ended()
        assert self._durable or not durable, "a durable write in a transaction that is not"

    def _refuse_ended(self) -> None:
        """Refuse to go on in a transaction that was ended, for instance on a full disk."""
        if not self.in_transaction:
            raise StorageError(
                f"the database has ended a transaction of {self.place} after a failure.",
                action="The failure before says what to do.",
            )

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Let everything inside see the ledger as it is now; no writer waits for it."""
        if self.in_transaction:
            yield
            return
        self._begin_moment()
        try:
            yield
        finally:
            self.execute("COMMIT")

    @property
    def in_durable(self) -> bool:
        """True if a durable transaction is open."""
        return self._depth > 0 and self._durable

    # --- statements -------------------------------------------------------------------------------

    def write(self, sql: str, args: Args = (), *, durable: bool = True) -> int:
        """Execute one changing statement, return how many rows it changed."""
        if self._depth:  # one statement is done or not, without a savepoint
            self._join(durable=durable)
            return self.execute(sql, args)
        with self.transaction(durable=durable):
            return self.execute(sql, args)

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
        if self.read_only or self.in_transaction:
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

    def one(self, cls: type[T], sql: str, args: Args = ()) -> T | None:
        """Return the first row of a query as a dataclass, None when there is no row."""
        rows = self.all(cls, sql, args)
        return rows[0] if rows else None


@functools.lru_cache(maxsize=512)
def changed_table(sql: str) -> str:
    """Return the table that a statement changes; `ANY_TABLE` if that is not clear, "" if none."""
    found = _CHANGE.match(sql)
    if found is not None:
        return found[1].lower()
    return "" if _NO_CHANGE.match(sql) else ANY_TABLE


@functools.cache
def _columns(cls: type) -> tuple[tuple[str, Callable[[Any], object] | None], ...]:
    """Return the columns of a table and how each is decoded."""
    return tuple((spec.name, spec.metadata.get("decode")) for spec in dataclasses.fields(cls))


def build(cls: type[R], row: Row) -> R:
    """Make a dataclass from a row that has (at least) its columns.

    Its `TABLE` is the table's name, for a sentence about damage.

    Raises:
        CorruptFile: a column holds an impossible value.
    """
    values: dict[str, object] = {}
    for name, decode in _columns(cls):  # type: ignore[arg-type]
        value = row[name]
        try:
            values[name] = decode(value) if decode is not None else value
        except (ValueError, TypeError, RecursionError) as error:
            table = getattr(cls, "TABLE", cls.__name__)
            raise CorruptFile(
                f"the ledger is damaged: column {name} of table {table} cannot be read.",
                action="Stop the server and restore a backup into a new directory: "
                "fcil-server restore",
            ) from error
    return cls(**values)
