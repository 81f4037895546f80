"""The text form of a run's class names."""

from __future__ import annotations

from typing import Any

from fcil_protocol.process.tables import console, show_table, table
from fcil_protocol.process.terminal import printable


def show_classes(rows: list[dict[str, Any]]) -> None:
    """Print one line per class name."""
    out = console()
    if not rows:
        out.print("no class name yet")
        return
    shown = table("id", "class", "task", "also called", "first brought by", wraps=("also called",))
    for row in rows:
        shown.add_row(
            "" if row["id"] is None else str(row["id"]),
            printable(row["name"]),
            _where(row),
            printable(", ".join(row["aliases"])),
            printable(row["first_seen_by"]),
        )
    show_table(out, shown)


def _where(row: dict[str, Any]) -> str:
    hidden = ", hidden" if row["hidden"] else ""
    if row["task"] is not None:
        return f"{row['task']}{hidden}"
    if row["planned_task"] is not None:
        return f"planned for {row['planned_task']}{hidden}"
    return f"waits{hidden}" if row["admitted"] else f"to be admitted{hidden}"
