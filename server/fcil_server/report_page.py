"""What reports are written with: a self-contained page, tables, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from fcil_server.svg import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
NOTHING = "-"  # what is undefined


def page(title: str, body: str) -> str:
    """Return a document that makes no request, around a body of escaped HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def section(title: str, content: str) -> str:
    """Put a heading over a piece of a page."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def folded(title: str, content: str) -> str:
    """Fold a piece of a page away under its title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: int = 1,
    wide: Sequence[int] = (),
) -> str:
    """Make a table; the first ``text`` columns and those in ``wide`` are aligned left."""

    def line(cells: Sequence[str], tag: str) -> str:
        left = [' class="text"' if i < text or i in wide else "" for i in range(len(cells))]
        inside = "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, left, strict=True)
        )
        return f"<tr>{inside}</tr>"

    lines = "".join(line(row, "td") for row in rows)
    if not lines:
        return "<p>None yet.</p>"
    return f'<div class="scroll"><table>{line(head, "th")}{lines}</table></div>'


def percent(value: float | None) -> str:
    """Write an accuracy."""
    return NOTHING if value is None else f"{value:.1f} %"


def points(value: float | None) -> str:
    """Write a difference of accuracies."""
    return NOTHING if value is None else f"{value:.1f} pp"


def duration(seconds: float) -> str:
    """Write seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def when(moment: float | None) -> str:
    """Write a moment in UTC."""
    return "" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
