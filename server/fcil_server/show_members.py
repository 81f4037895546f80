"""The text form of members and tickets."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from fcil_protocol.terminal import printable
from fcil_server.rundata import format_bytes
from fcil_server.show import ago
from fcil_server.standing import day


def show_members(rows: list[dict[str, Any]], tickets: list[dict[str, Any]]) -> None:
    """Print members, the newest refusal of each, and open tickets."""
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not rows:
        out.print("no client yet; invite one with: fcil-server enrol NAME")
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("client", "state", "since", "last seen"):
            table.add_column(title)
        for title in ("rounds", "wire up", "wire down"):
            table.add_column(title, justify="right")
        table.add_column("last refusal")
        for row in rows:
            table.add_row(
                _name(row),
                row["state"],
                day(row["enrolled_at"])[:10],
                ago(row["last_seen"]),
                str(row["rounds"]),
                format_bytes(row["wire_up"]),
                format_bytes(row["wire_down"]),
                _why(row),
            )
        out.print(table)
    for ticket in tickets:
        out.print(f"open ticket for {printable(ticket['name'])}, until {day(ticket['expires_at'])}")


def _name(row: dict[str, Any]) -> str:
    name = printable(row["name"])
    if row["role"] == "relay":
        return f"{name} (relay)"
    return f"{name} via {printable(row['via'])}" if row["via"] else name


def _why(row: dict[str, Any]) -> str:
    if row["revoked_why"]:
        return printable(row["revoked_why"])
    return printable(row["refusals"][0]["reason"]) if row["refusals"] else ""
