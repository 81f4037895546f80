"""Output of ``fcil-server rounds``, as a table and as CSV."""

from __future__ import annotations

import csv
import sys
from typing import Any

from fcil_protocol.formats import format_bytes, loss
from fcil_protocol.process.tables import Column, console, show_table
from fcil_protocol.process.terminal import count_of, printable
from fcil_server.ledger.labels import ANSWERS, CLOSED_BY


def show_rounds(rows: list[dict[str, Any]]) -> None:
    """Print rounds as a table."""
    out = console()
    if not rows:
        out.print("no round yet")
        return
    show_table(out, rows, _ROUNDS)
    for row in rows:
        for one in row["excluded"]:
            text = f"round {row['seq']} left out {one['name'] or one['client']}: {one['reason']}"
            out.print(printable(text))
        if remarks := _remarks(row):
            out.print(printable(f"round {row['seq']}: {'; '.join(remarks)}"))
    counted = {row["wire_source"] for row in rows}
    how = "as the kernel counted it" if counted == {"kernel"} else "by the exact formula"
    out.print(f"wire: TCP payload of all clients, {how}", style="dim")


_ROUNDS = (
    *map(Column, ("seq", "task", "kind", "round", "outcome")),
    Column("asked", right=True),
    Column("counted", right=True),
    Column("loss", lambda row: loss(row["train_loss"]), right=True),
    Column("seconds", lambda row: f"{row['seconds']:.1f}", right=True),
    Column("wire up", lambda row: format_bytes(row["wire_up"]), right=True),
    Column("wire down", lambda row: format_bytes(row["wire_down"]), right=True),
)


def _remarks(row: dict[str, Any]) -> list[str]:
    """Return the deviations of a round from its plan."""
    remarks = [CLOSED_BY[row["closed_by"]]] if row["closed_by"] in CLOSED_BY else []
    if row["reopened"]:
        remarks.append(f"reopened {row['reopened']} x")
    for one in row["answers"][:12]:
        why = f" ({one['reason']})" if one["reason"] else ""
        remarks.append(f"{one['name'] or one['client'][:8]} {ANSWERS[one['answer']]}{why}")
    remarks += ["..."] if len(row["answers"]) > 12 else []
    for one in row["stale"][:12]:
        age = count_of(one["states"], "state")
        remarks.append(f"the update of {one['name'] or one['client'][:8]} is {age} old")
    return [*remarks, *(["..."] if len(row["stale"]) > 12 else [])]


def rounds_csv(rows: list[dict[str, Any]]) -> None:
    """Write rounds as CSV to stdout; a list in JSON becomes its length."""
    lines = csv.writer(sys.stdout, lineterminator="\n")
    names = list(rows[0]) if rows else ["seq"]
    lines.writerow(names)
    for row in rows:
        lines.writerow(len(row[n]) if isinstance(row[n], list) else row[n] for n in names)
