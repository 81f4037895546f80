"""The text form of members and tickets."""

from __future__ import annotations

from typing import Any

from fcil_protocol.process.tables import console, show_table, table
from fcil_protocol.process.terminal import printable
from fcil_server.cli.tables import ago
from fcil_server.federation.eligibility import day
from fcil_server.ledger.labels import GONE
from fcil_server.reports.results.run_data import format_bytes


def show_members(rows: list[dict[str, Any]], tickets: list[dict[str, Any]]) -> None:
    """Print members, the newest refusal of each, and open tickets."""
    out = console()
    if not rows:
        out.print("no client yet; invite one with: fcil-server enrol NAME")
    else:
        numbers = ("rounds", "wire up", "wire down")
        shown = table("client", "state", "since", "last seen", *numbers, right=numbers)
        for row in rows:
            shown.add_row(
                _name(row),
                row["state"],
                day(row["enrolled_at"])[:10],
                ago(row["last_seen"]),
                str(row["rounds"]),
                format_bytes(row["wire_up"]),
                format_bytes(row["wire_down"]),
            )
        show_table(out, shown)
        for row in rows:
            if why := _why(row):
                out.print(f"{_name(row)}: {why}")
    for ticket in tickets:
        out.print(f"open ticket for {printable(ticket['name'])}, until {day(ticket['expires_at'])}")


def _name(row: dict[str, Any]) -> str:
    name = printable(row["name"])
    if row["role"] == "relay":
        return f"{name} (relay)"
    return f"{name} via {printable(row['via'])}" if row["via"] else name


def _why(row: dict[str, Any]) -> str:
    if row["state"] in GONE:
        return printable(row["revoked_why"]) if row["state"] == "revoked" else ""
    newest = row["refusals"][0] if row["refusals"] else None
    return printable(f"{newest['reason']} ({ago(newest['at'])})") if newest else ""
