"""Tables on a terminal or in a pipe, without truncated cells.

On a terminal, columns that may wrap become narrower; a row that still does not fit continues beyond
the edge, like any long line. A pipe or a file has no width: there each row is one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fcil_protocol.process.terminal import printable

_NO_WIDTH = 10_000  # columns: wider than any row


def console() -> Console:
    """Return the console for text and tables on stdout; names in them are no markup."""
    endless = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = _NO_WIDTH if endless else None
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=width)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        cell: key or index of a row's value, or a function that returns a row's cell; None: the
            title is the key. A cell that is None is empty.
        right: aligned right.
        wraps: may take several lines on a narrow terminal; the others, such as names to give to
            other commands, stay in one piece.
        style: of its text.
    """

    title: str
    cell: str | int | Callable[[Any], object] | None = None
    right: bool = False
    wraps: bool = False
    style: str = ""

    def text(self, row: Any) -> str:
        """Return the cell of a row, without control characters."""
        cell = self.title if self.cell is None else self.cell
        value = cell(row) if callable(cell) else row[cell]
        return "" if value is None else printable(str(value))


def table(rows: Iterable[Any], columns: Sequence[Column], **look: Any) -> Table:
    """Return a table of rows, without lines; for `show`.

    Args:
        rows: anything that the columns make cells of.
        columns: from left to right.
        look: of a table with a title or lines, as `rich.table.Table` takes it.
    """
    made = Table(**(look or {"box": None, "pad_edge": False}))
    for column in columns:
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            style=column.style,
        )
    for row in rows:
        made.add_row(*(column.text(row) for column in columns))
    return made


def least_width(out: Console, shown: Table) -> int:
    """Return the columns of a terminal that a table needs to have each cell in one piece."""
    wide = out.options.update(width=_NO_WIDTH)
    for column in shown.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells]
            column.min_width = max(Measurement.get(out, wide, cell).maximum for cell in cells)
    return Measurement.get(out, wide, shown).minimum


def show(out: Console, shown: Table) -> None:
    """Print a table; lines that do not fit continue beyond the edge of the terminal."""
    least = least_width(out, shown)
    if least > out.width:
        shown.width = least
    out.print(shown)


def show_table(out: Console, rows: Iterable[Any], columns: Sequence[Column]) -> None:
    """Print a table of rows, as `show` does."""
    show(out, table(rows, columns))
