"""The text form of members and tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcil_protocol.formats import ago, day, format_bytes, minute
from fcil_protocol.process.tables import Column, console, show_table
from fcil_protocol.process.terminal import printable
from fcil_server.cli.options import DEFAULT_DIRECTORY, with_dir
from fcil_server.ledger.labels import GONE, name_with_relay


def show_members(
    rows: list[dict[str, Any]],
    tickets: list[dict[str, Any]],
    directory: Path = DEFAULT_DIRECTORY,
) -> None:
    """Print members, the newest refusal of each, and open tickets."""
    out = console()
    if not rows:
        out.print(with_dir("no client yet; invite one with: fcil-server enrol NAME", directory))
    else:
        show_table(out, rows, _COLUMNS)
        for row in rows:
            if why := _why(row):
                out.print(printable(f"{name_with_relay(row)}: {why}"))
    for ticket in tickets:
        until = minute(ticket["expires_at"])
        out.print(f"open ticket for {printable(ticket['name'])}, until {until}")


def _why(row: dict[str, Any]) -> str:
    if row["state"] in GONE:
        return str(row["revoked_why"]) if row["state"] == "revoked" else ""
    newest = row["refusals"][0] if row["refusals"] else None
    return f"{newest['reason']} ({ago(newest['at'])})" if newest else ""


_COLUMNS = (
    Column("client", name_with_relay),
    Column("state"),
    Column("since", lambda row: day(row["enrolled_at"])),
    Column("last seen", lambda row: ago(row["last_seen"])),
    Column("rounds", right=True),
    Column("wire up", lambda row: format_bytes(row["wire_up"]), right=True),
    Column("wire down", lambda row: format_bytes(row["wire_down"]), right=True),
)
