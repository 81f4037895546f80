"""Opens a ledger where it is: a file in the federation's directory, or in Postgres."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_directory
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.databases.location import LOCATION_NAME, Location
from fcil_server.ledger.databases.sqlite import LEDGER_NAME, SqliteDatabase, log_path, older_name


def open_database(
    path: Path, *, read_only: bool = False, clock: Callable[[], float] = time.time
) -> Database:
    """Open a ledger.

    Args:
        path: of its file; or where that would be, with `LOCATION_NAME` beside it.
        read_only: for a reader; otherwise a file that does not exist is made.
        clock: tells unix seconds.

    Raises:
        As `SqliteDatabase` and `PostgresDatabase`.
    """
    location = location_of(path)
    if location is None:
        return SqliteDatabase(path, read_only=read_only, clock=clock)
    need_psycopg()
    from fcil_server.ledger.databases.postgres import PostgresDatabase

    return PostgresDatabase(path, location, read_only=read_only, clock=clock)


def need_psycopg() -> None:
    """Check that psycopg is installed, which few federations need.

    Raises:
        StorageError: it is not.
    """
    try:
        import psycopg  # noqa: F401
    except ImportError as missing:
        raise StorageError(
            "a ledger in Postgres needs the package psycopg, which is not installed.",
            action="Install it: pip install 'fcil[postgres]'",
        ) from missing


def location_of(path: Path) -> Location | None:
    """Return where in Postgres a ledger is; None: it is a file.

    Raises:
        CorruptFile: the file that says it is damaged.
    """
    named = path.with_name(LOCATION_NAME)
    return Location.read(named) if path.name == LEDGER_NAME and named.exists() else None


def host_of_server(directory: Path) -> str:
    """Return the other host whose server works on a ledger in Postgres; "" if none is known."""
    with contextlib.suppress(FcilError):  # those who need the ledger say what is wrong with it
        location = location_of(directory / LEDGER_NAME)
        if location is not None:
            need_psycopg()
            from fcil_server.ledger.databases.postgres import host_elsewhere

            return host_elsewhere(location)
    return ""


def set_aside_moved(path: Path) -> None:
    """Rename the file of a ledger that was moved to Postgres: it is not the ledger any more.

    Call it with the directory's lock. A kill in the middle of a move leaves both.

    Raises:
        StorageError: it cannot be renamed.
    """
    if location_of(path) is None:
        return
    with storage_errors("set aside", path):
        # A name by which a later erase finds it. A kill may have left commits in the log.
        kept = path.with_name(older_name("before-move"))
        for old, new in ((log_path(path), log_path(kept)), (path, kept)):
            if old.exists():
                old.replace(new)
        path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    sync_directory(path.parent)


def has_ledger(directory: Path) -> bool:
    """Return True if a federation's directory has a ledger, of either kind, that is not empty."""
    path = directory / LEDGER_NAME
    return path.with_name(LOCATION_NAME).exists() or (path.exists() and path.stat().st_size > 0)
