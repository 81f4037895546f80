"""Moving the ledger of a stopped server: from its file to Postgres, and back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from fcil_protocol.errors import StorageError, UsageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_directory
from fcil_server.federation.directory import Federation, find_directory
from fcil_server.ledger.databases.location import LOCATION_NAME, Location
from fcil_server.ledger.databases.opening import location_of, need_psycopg, set_aside_moved
from fcil_server.ledger.databases.sqlite import SqliteDatabase
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

FILE = "file"  # how `move-ledger` names a ledger in the federation's directory


def move_ledger(directory: Path, to: str, actor: str, *, replace: bool = False) -> str:
    """Move the ledger of a federation that no server has open; return where it now is.

    A kill at any moment leaves the ledger whole where it was, or where it goes.

    Args:
        directory: the federation's.
        to: the URL of a Postgres database, or `FILE`.
        actor: who moves it, for the audit log.
        replace: drop a ledger that is there in Postgres, unless a server works on it.

    Raises:
        UsageError: it is there already, or something else is. Locked: a server is running.
        StorageError: Postgres cannot be reached.
    """
    find_directory(directory)
    path = directory / LEDGER_NAME
    now = location_of(path)
    if to == FILE:
        if now is None:
            raise UsageError(f"the ledger is in the file {path} already.")
        _move_out(directory, now, actor)
        return str(path)
    if now is not None:
        raise UsageError(
            f"the ledger is at {now} already.",
            action=f"Move it back first: fcil-server move-ledger {FILE}",
        )
    return _move_in(directory, to, actor, replace=replace)


def _move_in(directory: Path, url: str, actor: str, *, replace: bool) -> str:
    need_psycopg()
    from fcil_server.ledger.databases.postgres import move_in
    from fcil_server.ledger.databases.postgres_connection import check_url

    path = directory / LEDGER_NAME
    with closing(Federation.open_stopped(directory)) as federation:
        location = Location.of(url, federation.id)
        check_url(location)
        move_in(location, path, replace=replace)
        location.write(path.with_name(LOCATION_NAME))  # from here on the ledger is there
        federation.ledger.close()
        set_aside_moved(path)
        with Ledger(path) as ledger:
            ledger.audit.add(actor, "move_ledger", f"to {location}")
    return str(location)


def _move_out(directory: Path, location: Location, actor: str) -> None:
    need_psycopg()
    from fcil_server.ledger.databases.postgres import PostgresDatabase

    path = directory / LEDGER_NAME
    with closing(Federation.open_stopped(directory)) as federation:
        database = federation.ledger.database
        assert isinstance(database, PostgresDatabase), "there is a file that says so"
        set_aside_moved(path)  # a log that is left would be taken for the new file's
        database.keep_as(path)
        with Ledger(path, database=SqliteDatabase(path)) as ledger:  # which refuses a damaged file
            ledger.audit.add(actor, "move_ledger", f"from {location}")
        with storage_errors("remove", path.with_name(LOCATION_NAME)):
            path.with_name(LOCATION_NAME).unlink()  # from here on the file is the ledger
            sync_directory(directory)
        try:
            database.drop()
        except StorageError as error:
            raise StorageError(
                f"the ledger is now in {path}, but Postgres could not drop its own: "
                f"{error.message}",
                action=f"Drop it there: DROP SCHEMA {location.schema} CASCADE",
            ) from error
