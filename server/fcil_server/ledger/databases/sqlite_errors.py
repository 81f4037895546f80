"""SQLite's errors as ours: busy, full, damaged, not to be used."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fcil_protocol.errors import (
    CorruptFile,
    DiskFull,
    FcilError,
    InternalError,
    Locked,
    StorageError,
)

BUSY_S = 10.0  # a reader's long query or a checkpoint may hold the file this long
_NOT_TEXT = re.compile(r"Could not decode to UTF-8 column '(\w+)'")


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raise what SQLite raises inside as one of our errors, with the ledger's name."""
    try:
        yield
    except sqlite3.Error as error:
        raise _named(error, path) from error


def damaged(path: Path, how: str) -> CorruptFile:
    """Return the error for a ledger that cannot be read."""
    return CorruptFile(
        f"the ledger {path} is damaged: {how}.",
        action="Stop the server and restore a backup into a new directory: fcil-server restore",
    )


def _named(error: sqlite3.Error, path: Path) -> FcilError:
    """Turn an SQLite error into ours; the low byte of its code says which."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Locked(
            f"another process has been writing to {path} for over {BUSY_S:.0f} s.",
            action="Stop that process; one server works on a federation directory.",
        )
    undecodable = _NOT_TEXT.match(str(error))
    if undecodable is not None:  # SQLite's sentence holds the whole text
        return damaged(path, f"the text of column {undecodable[1]} cannot be read")
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(
            f"no space is left on the disk of {path}.",
            action="Free space; nothing that was acknowledged is lost.",
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    if code in (
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    ):
        return StorageError(
            f"the ledger {path} cannot be used: {error}.",
            action="Check its permissions and its disk.",
        )
    return InternalError(f"the ledger {path} refused a statement: {error}.")
