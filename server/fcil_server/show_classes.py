"""The text form of a run's class names."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from fcil_protocol.terminal import printable


def show_classes(rows: list[dict[str, Any]]) -> None:
    """Print one line per class name."""
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not rows:
        out.print("no class name yet")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("id", "class", "task", "also called", "first brought by"):
        table.add_column(title)
    for row in rows:
        table.add_row(
            "" if row["id"] is None else str(row["id"]),
            printable(row["name"]),
            _where(row),
            printable(", ".join(row["aliases"])),
            printable(row["first_seen_by"]),
        )
    out.print(table)


def _where(row: dict[str, Any]) -> str:
    hidden = ", hidden" if row["hidden"] else ""
    if row["task"] is not None:
        return f"{row['task']}{hidden}"
    if row["planned_task"] is not None:
        return f"planned for {row['planned_task']}{hidden}"
    return f"waits{hidden}" if row["admitted"] else f"to be admitted{hidden}"
