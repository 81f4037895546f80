"""Decoding of SQLite rows into dataclasses of `ledger.rows`; detects damaged ones."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from fcil_protocol.errors import CorruptFile
from fcil_server.ledger.rows import (
    AnswerRow,
    ByteCount,
    ClassRow,
    ClientRow,
    RoundRow,
    RunRow,
    TaskRow,
    TicketRow,
    UpdateFate,
    UpdateRow,
)

# Those that hold more than SQLite's own types, so that reading them may fail.
_TABLES: dict[type, str] = {
    ClientRow: "clients",
    TicketRow: "tickets",
    RunRow: "runs",
    ClassRow: "classes",
    TaskRow: "tasks",
    RoundRow: "rounds",
    UpdateRow: "updates",
    UpdateFate: "updates",
    AnswerRow: "answers",
    ByteCount: "bytes",
}

R = TypeVar("R")


@functools.cache
def _columns(cls: type) -> tuple[tuple[str, Callable[[Any], object] | None], ...]:
    """Return the columns of a table and how each is decoded."""
    return tuple((spec.name, spec.metadata.get("decode")) for spec in dataclasses.fields(cls))


def build(cls: type[R], row: sqlite3.Row) -> R:
    """Make a dataclass from a row that has (at least) its columns.

    Raises:
        CorruptFile: a column holds an impossible value.
    """
    values: dict[str, object] = {}
    for name, decode in _columns(cls):  # type: ignore[arg-type]
        value = row[name]
        try:
            values[name] = decode(value) if decode is not None else value
        except (ValueError, TypeError, RecursionError) as error:
            table = _TABLES.get(cls, cls.__name__)
            raise CorruptFile(
                f"the ledger is damaged: column {name} of table {table} cannot be read.",
                action="Stop the server and restore a backup into a new directory: "
                "fcil-server restore",
            ) from error
    return cls(**values)
