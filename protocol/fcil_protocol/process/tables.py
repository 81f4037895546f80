"""Tables on a terminal or in a pipe, without truncated cells.

On a terminal, columns that may wrap become narrower; a row that still does not fit continues beyond
the edge, like any long line. A pipe or a file has no width: there each row is one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from typing import Literal

_NO_WIDTH = 10_000  # columns: wider than any row


def console() -> Console:
    """Return the console for text and tables on stdout; names in them are no markup."""
    endless = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = _NO_WIDTH if endless else None
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=width)


def table(*titles: str, right: Collection[str] = (), wraps: Collection[str] = ()) -> Table:
    """Return an empty table without lines.

    Args:
        titles: column titles.
        right: titles of right-aligned columns.
        wraps: titles of columns that may take several lines on a narrow terminal; the others, such
            as names to give to other commands, stay in one piece.
    """
    made = Table(box=None, pad_edge=False)
    for title in titles:
        side: Literal["left", "right"] = "right" if title in right else "left"
        made.add_column(title, justify=side, no_wrap=title not in wraps, overflow="fold")
    return made


def show_table(out: Console, shown: Table) -> None:
    """Print a table; lines that do not fit continue beyond the edge of the terminal."""
    wide = out.options.update(width=_NO_WIDTH)
    for column in shown.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells]
            column.min_width = max(Measurement.get(out, wide, cell).maximum for cell in cells)
    least = Measurement.get(out, wide, shown).minimum
    if least > out.width:
        shown.width = least
    out.print(shown)
