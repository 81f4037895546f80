"""Psycopg for the ledger: connections, statements in Postgres's dialect, errors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.adapt import Loader

from fcil_protocol.errors import DiskFull, FcilError, InternalError, StorageError, UsageError
from fcil_server.ledger.databases.database import Args, Value
from fcil_server.ledger.databases.location import Location

if TYPE_CHECKING:
    from psycopg.rows import RowMaker

Connection = psycopg.Connection[Any]
_UNUSABLE = (
    psycopg.OperationalError,
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ReadOnlySqlTransaction,  # of a replica
)

_CONNECT_TIMEOUT_S = 10
# A host that lost its power keeps its claim until Postgres misses it.
_KEEPALIVE = {"idle": 5, "interval": 5, "count": 3}
_LOST_AFTER_MS = 20_000
_DIALECT = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("%", "%%"),
        (r"\bIS \?", "IS NOT DISTINCT FROM ?"),
        (r"\bifnull\(", "coalesce("),
        (r"\binstr\(", "strpos("),
        (r"\bx''", "''::bytea"),
        (r"json_each\(([^)]*)\)", r"json_array_elements_text(\1) AS value"),
        (r"json_extract\(([\w.]+), '\$\.(\w+)'\)", r"(\1::json->>'\2')::numeric"),
        (r"\?", "%s"),
        (r"(?<![:\w]):(\w+)", r"%(\1)s"),
    )
)


def check_url(location: Location) -> None:
    """Check that libpq knows everything that a URL says.

    Raises:
        UsageError: it does not.
    """
    try:
        given = psycopg.conninfo.conninfo_to_dict(location.url)
        psycopg.conninfo.timeout_from_conninfo(given)  # else read only with the connection
    except (psycopg.ProgrammingError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the URL is not one of Postgres: {str(error).strip()}.",
            action="Give it like: postgresql://user@host:5432/database?sslmode=verify-full",
        ) from error


def connect(
    location: Location, *, read_only: bool = False, timeout_s: int = _CONNECT_TIMEOUT_S
) -> Connection:
    """Connect to a database, whose tables are looked up in the ledger's schema."""
    given = psycopg.conninfo.conninfo_to_dict(location.url)
    options = [str(given.pop("options", "")), f"-c search_path={location.schema}"]
    options += [f"-c tcp_keepalives_{name}={value}" for name, value in _KEEPALIVE.items()]
    options += [f"-c tcp_user_timeout={_LOST_AFTER_MS}", "-c synchronous_commit=on"]
    options += ["-c default_transaction_read_only=on"] if read_only else []
    ours: dict[str, Any] = {
        "connect_timeout": timeout_s,
        "application_name": "fcil-server",
        "tcp_user_timeout": _LOST_AFTER_MS,
        **{f"keepalives_{name}": value for name, value in _KEEPALIVE.items()},
    }
    fixed = {"client_encoding": "UTF8", "options": " ".join(options)}
    whole = psycopg.conninfo.make_conninfo(**{**ours, **given, **fixed})
    db = psycopg.connect(whole, autocommit=True, cursor_factory=psycopg.ClientCursor)
    db.row_factory = _rows
    db.adapters.register_loader("numeric", _Number)
    return db


@functools.lru_cache(maxsize=512)
def translated(sql: str) -> str:
    """Return a statement of the ledger's for Postgres and psycopg."""
    for pattern, replacement in _DIALECT:
        sql = pattern.sub(replacement, sql)
    return sql


@contextmanager
def named_errors(place: str) -> Iterator[None]:
    """Raise what psycopg raises inside as one of our errors."""
    try:
        yield
    except psycopg.Error as error:
        raise _named(error, place) from error


def _named(error: psycopg.Error, place: str) -> FcilError:
    text = str(error).strip().splitlines()
    why = text[0] if text else type(error).__name__
    if isinstance(error, psycopg.errors.DiskFull):
        return DiskFull(
            f"no space is left for the ledger at {place}.",
            action="Free space; nothing that was acknowledged is lost.",
        )
    if isinstance(error, _UNUSABLE):
        return StorageError(
            f"the ledger at {place} cannot be used: {why}.",
            action="Check that Postgres runs and lets this host and user in. Nothing that was "
            "acknowledged is lost.",
        )
    return InternalError(f"the ledger at {place} refused a statement: {why}.")


class _Number(Loader):
    """Sums of whole numbers are of the type numeric in Postgres; here they are whole numbers."""

    def load(self, data: Any) -> int | float:
        text = bytes(data)
        return int(text) if text.lstrip(b"-").isdigit() else float(text)


class _Row(tuple[Any, ...]):
    """Values by position or by the column's name."""

    __slots__ = ()
    positions: Mapping[str, int] = {}

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.positions[key] if isinstance(key, str) else key)

    def keys(self) -> Sequence[str]:
        """Return the names of the columns."""
        return list(self.positions)


@functools.lru_cache(maxsize=512)
def _row_of(names: tuple[str, ...]) -> type[_Row]:
    positions = {name: position for position, name in enumerate(names)}
    return type("Row", (_Row,), {"__slots__": (), "positions": positions})


def _rows(cursor: psycopg.Cursor[Any]) -> RowMaker[Any]:
    return _row_of(tuple(column.name for column in cursor.description or ()))


def arguments(args: Args) -> Any:
    """Return the arguments of a statement as psycopg takes them."""
    if isinstance(args, Mapping):
        return {name: value_of(value) for name, value in args.items()}
    return [value_of(value) for value in args]


def value_of(value: Value) -> Value:
    """Return a value as psycopg takes it; Postgres has no text with a zero byte."""
    if isinstance(value, float) and math.isnan(value):
        return None  # as SQLite stores it
    if isinstance(value, str):
        text = value.value if isinstance(value, Enum) else value
        return str(text).replace("\0", "\N{REPLACEMENT CHARACTER}")
    return value
