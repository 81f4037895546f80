"""Formats of reports: tables, and numbers for readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NOTHING = "-"  # for undefined values


def folded(title: str, content: str) -> str:
    """Fold a piece of HTML away under its title."""
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
    """Format an accuracy."""
    return NOTHING if value is None else f"{value:.1f} %"


def points(value: float | None) -> str:
    """Format a difference of accuracies."""
    return NOTHING if value is None else f"{value:.1f} pp"


def duration(seconds: float) -> str:
    """Format seconds with a readable unit."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
