"""Frozen features on disk, shared by the workers of an experiment's cells (torch-free).

A folder of SQLite files with numbers. The highest is in use; a damaged one is replaced by the next
number, since other processes may still have it open. Every feature has a checksum of its own, which
covers its key: SQLite finds damage of its structure, but not of a feature's numbers.

A cache that cannot be read or written never fails a worker: features are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import numpy as np

from fcil_adapters.backbones.feature_cache import F32, FeatureKey
from fcil_adapters.worker.feature_folder import STEM, FeatureFolder, file_of, newest
from fcil_protocol.errors import FcilError
from fcil_protocol.storage.atomic_files import make_private, place_new, scratch

FORMAT = 1
BUSY_S = 5.0  # another process may write this long; beyond it, features are computed or not stored

_PAGE = 16384  # bytes; five features of ViT-B
_LOG_PAGES = 256  # of the write-ahead log, before it is brought into the file
_AT_ONCE = 64  # features in a query or a transaction
_CHECK = 16  # bytes of a checksum
_USE_S = 3600.0  # last uses are known to the hour, so that reading seldom writes
_REMOVED = 8  # a full cache loses one in so many features at once
_MOST_DAMAGES = 3  # a disk that damages more files is at fault
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SCHEMA = f"""
CREATE TABLE features (key BLOB PRIMARY KEY, used INTEGER NOT NULL, feature BLOB NOT NULL);
CREATE INDEX by_use ON features (used);
PRAGMA user_version = {FORMAT};
"""

Row = tuple[bytes, int, bytes]  # key, hour of the last use, feature with checksum
T = TypeVar("T")


class _Damaged(Exception):
    """A file that SQLite reads, and that is not as it was written."""


class FeatureFiles:
    """The features of one loaded backbone in the folder (`feature_cache.FeatureStore`).

    Args:
        place: the folder, its bound and the file for counts.
        numerics: everything besides weights and pixels that decides a feature's last bits: engine,
            versions, device, threads.
        clock: unix seconds.
    """

    def __init__(
        self, place: FeatureFolder, numerics: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._place = place
        self._numerics = numerics.encode()
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self._open_number = 0
        self._damages = 0
        self._reads = self._writes = True

    def get(self, keys: Sequence[FeatureKey]) -> dict[FeatureKey, F32]:
        """Return the stored features (d,) among these keys."""
        names = {self._name(key): key for key in keys}
        found: dict[FeatureKey, F32] = {}
        for some in _chunks(list(names)):
            rows = self._try(partial(_read, names=some), writing=False) or []
            found.update((names[name], _numbers(feature)) for name, _, feature in rows)
            hour = self._hour()
            if old := [(hour, name) for name, used, _ in rows if used < hour]:
                self._try(partial(_mark_used, uses=old), writing=True)
        if found:
            self._append({"read": len(found)})
        return found

    def put(self, features: Mapping[FeatureKey, F32]) -> None:
        """Store computed features (d,); the least used make room if there is none."""
        most, hour, removed = self._place.most_bytes // _PAGE, self._hour(), 0
        rows = [_row(self._name(key), hour, feature) for key, feature in features.items()]
        for some in _chunks(rows):
            removed += self._try(partial(_write, rows=some, most=most), writing=True) or 0
        self._append({"computed": len(rows), "removed": removed})

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None

    def _name(self, key: FeatureKey) -> bytes:
        tap, pixels = key
        parts = (self._numerics, tap.encode(), pixels)
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).digest()

    def _hour(self) -> int:
        return int(self._clock() // _USE_S)

    def _append(self, facts: Mapping[str, object]) -> None:
        """Add a line to the cell's counts: one short append, which processes do not mix."""
        line = json.dumps(facts).encode() + b"\n"
        with contextlib.suppress(OSError), self._place.counts.open("ab") as file:
            file.write(line)

    # --- files and faults -------------------------------------------------------------------

    def _try(self, work: Callable[[sqlite3.Connection], T], *, writing: bool) -> T | None:
        """Return the result of some work on the file; None if the cache cannot do it now."""
        for _ in range(2):  # a second time with the file that replaces a damaged one
            if not (self._writes if writing else self._reads):
                break
            try:
                return work(self._opened())
            except (sqlite3.Error, _Damaged, OSError, FcilError) as error:
                if not self._replaced(error, writing=writing):
                    break
        return None

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            folder = self._place.folder
            if not newest(folder):
                make_private(folder)
                _create(folder, 1)
            self._open_number = newest(folder)
            self._db = _connect(file_of(folder, self._open_number))
        return self._db

    def _replaced(self, error: Exception, *, writing: bool) -> bool:
        """Return True if the file was damaged and another one takes its place."""
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if isinstance(error, sqlite3.Error) and code in _BUSY:
            return False
        if isinstance(error, _Damaged) or code in _DAMAGED:
            self._damages += 1
            if self._damages <= _MOST_DAMAGES and self._set_aside(error):
                return True
        folder = self._place.folder
        if writing and self._reads:
            self._fault(f"no further features are written to {folder}: {_reason(error, code)}")
        elif self._reads:
            self._reads = False
            self._fault(f"the cache of frozen features {folder} is off: {_reason(error, code)}")
        self._writes = False
        return False

    def _set_aside(self, error: Exception) -> bool:
        """Let the next number take the place of the file that is open."""
        self.close()
        folder, number = self._place.folder, self._open_number
        if newest(folder) > number:  # another process has found the damage
            return True
        try:
            _create(folder, number + 1)
        except (OSError, FcilError, sqlite3.Error):
            return False
        self._fault(
            f"the cache of frozen features {file_of(folder, number)} is damaged ({error}): "
            "it is set aside, and its features are computed again"
        )
        return True

    def _fault(self, sentence: str) -> None:
        self._append({"faults": [f"{sentence}."]})


def _reason(error: Exception, code: int) -> str:
    if isinstance(error, sqlite3.Error) and code == sqlite3.SQLITE_FULL:
        return "no space is left on its disk"
    return str(getattr(error, "message", error)).rstrip(".")


def _create(folder: Path, number: int) -> None:
    """Make an empty file, complete from the first moment that it has its name."""
    with scratch(folder, STEM.rstrip("-")) as name:
        room = name("new")
        room.mkdir(0o700)
        fresh = room / "new.sqlite"
        with contextlib.closing(_connect(fresh, mode="rwc")) as db:
            db.execute(f"PRAGMA page_size = {_PAGE}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_SCHEMA)
        with contextlib.suppress(FileExistsError):  # another process was faster
            place_new(fresh, file_of(folder, number))


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    url = f"file:{quote(str(path.absolute()))}?mode={mode}"
    # Autocommit: transactions are ours to begin and to end.
    db = sqlite3.connect(url, uri=True, isolation_level=None, timeout=BUSY_S)
    try:
        if mode == "rw" and (found := _pragma(db, "user_version")) != FORMAT:
            raise _Damaged(f"its format is {found}, not {FORMAT}")
        db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose features, and no more
        db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {_LOG_PAGES * _PAGE}")
    except BaseException:
        db.close()
        raise
    return db


# --- rows -----------------------------------------------------------------------------------


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE))


def _row(name: bytes, hour: int, feature: F32) -> Row:
    content = np.ascontiguousarray(feature, dtype="<f4").tobytes()
    return name, hour, content + _checksum(name, content)


def _checksum(name: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK, key=name).digest()


def _numbers(feature: bytes) -> F32:
    return np.frombuffer(feature[:-_CHECK], dtype="<f4")


def _read(db: sqlite3.Connection, names: Sequence[bytes]) -> list[Row]:
    marks = ",".join("?" * len(names))
    sql = f"SELECT key, used, feature FROM features WHERE key IN ({marks})"  # noqa: S608  marks
    rows: list[Row] = db.execute(sql, names).fetchall()
    for name, used, feature in rows:
        whole = isinstance(used, int) and isinstance(feature, bytes) and len(feature) % 4 == 0
        if not whole or feature[-_CHECK:] != _checksum(name, feature[:-_CHECK]):
            raise _Damaged("a feature differs from its checksum")
    return rows


def _mark_used(db: sqlite3.Connection, uses: Sequence[tuple[int, bytes]]) -> None:
    with _transaction(db):
        db.executemany("UPDATE features SET used = ? WHERE key = ?", uses)


def _write(db: sqlite3.Connection, rows: Sequence[Row], most: int) -> int:
    """Insert features; return the number of those removed for them."""
    # Twice their bytes: for the indexes and for pages that are not full.
    need = 8 + 2 * sum(100 + len(feature) for _, _, feature in rows) // _PAGE
    if need > most:
        return 0
    with _transaction(db):
        removed = _make_room(db, most, need)
        db.executemany("INSERT OR IGNORE INTO features VALUES (?, ?, ?)", rows)
    beyond = _pragma(db, "page_count") - most
    if beyond > 0:  # a script, since `execute` would free a single page
        db.executescript(f"PRAGMA incremental_vacuum({beyond})")
    return removed


def _make_room(db: sqlite3.Connection, most: int, need: int) -> int:
    """Remove the least used until some pages are free; return the number of the removed."""
    removed = 0
    while _lacks(db, most, need):
        (there,) = db.execute("SELECT count(*) FROM features").fetchone()
        if not there:
            break
        oldest = "SELECT rowid FROM features ORDER BY used, rowid LIMIT ?"
        removal = f"DELETE FROM features WHERE rowid IN ({oldest})"  # noqa: S608  no values
        removed += db.execute(removal, (there // _REMOVED + 1,)).rowcount
    return removed


def _lacks(db: sqlite3.Connection, most: int, need: int) -> bool:
    return _pragma(db, "page_count") - _pragma(db, "freelist_count") + need > most


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # SQLite itself ends the transaction on some failures, such as a full disk.
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise
