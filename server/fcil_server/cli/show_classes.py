"""The text form of a run's class names."""

from __future__ import annotations

from typing import Any

from fcil_protocol.process.tables import Column, console, show_table


def show_classes(rows: list[dict[str, Any]]) -> None:
    """Print one line per class name."""
    out = console()
    if not rows:
        out.print("no class name yet")
        return
    show_table(out, rows, _COLUMNS)


def _where(row: dict[str, Any]) -> str:
    hidden = ", hidden" if row["hidden"] else ""
    if row["task"] is not None:
        return f"{row['task']}{hidden}"
    if row["planned_task"] is not None:
        return f"planned for {row['planned_task']}{hidden}"
    return f"waits{hidden}" if row["admitted"] else f"to be admitted{hidden}"


_COLUMNS = (
    Column("id"),
    Column("class", "name"),
    Column("task", _where),
    Column("also called", lambda row: ", ".join(row["aliases"]), wraps=True),
    Column("first brought by", "first_seen_by"),
)
