"""The text form of what the commands show."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fcil_adapters.contract import Method
from fcil_protocol.ids import RunId
from fcil_protocol.terminal import printable
from fcil_server.ledger import Ledger
from fcil_server.report import summary_tables
from fcil_server.rundata import format_bytes


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)


def show_status(data: dict[str, Any]) -> None:
    """Print a status as text."""
    out = _console()
    federation, run, now = data["federation"], data["run"], data["now"]
    if data["running"]:
        where = ", ".join(federation["addresses"])
        out.print(f"federation  {printable(federation['name'])} at {where}", markup=False)
    else:
        out.print(f"federation  {federation['directory']} (not running)", markup=False)
    if run:
        out.print(
            f"run         {run['id']} ({run['status']}), {run['method']} on {run['backbone']}"
        )
    out.print(f"now         {_doing(now)}", markup=False)
    if now["waiting_for"]:
        out.print(f"waits for   {printable(now['waiting_for'])}", markup=False)
    _show_clients(out, data["clients"], now.get("answers", {}))
    waiting = [c["name"] for c in data["classes"] if c["waiting"]]
    placed = len(data["classes"]) - len(waiting)
    out.print(f"classes     {placed} in tasks, {len(waiting)} waiting")


def _doing(now: dict[str, Any]) -> str:
    if now["kind"] is None:
        return str(now["phase"])
    text = f"{now['phase']}, task {now['task']} {now['kind']} round {now['round']}"
    if now.get("remaining_s") is not None:
        text += f", {now['remaining_s']:.0f} s left"
    return text


def _show_clients(out: Console, clients: list[dict[str, Any]], answers: dict[str, str]) -> None:
    if not clients:
        out.print("clients     none yet; join with: fcil-client join --data FOLDER")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("client", "state", "images", "classes", "this round", "last seen", "device"):
        table.add_column(title)
    for row in clients:
        progress = row.get("progress")
        doing = answers.get(row["id"], "")
        if doing == "none" and progress:
            phase, done, total = progress
            doing = f"{phase} {100 * done // max(total, 1)} %"
        table.add_row(
            printable(row["name"]),
            row["state"],
            _or_blank(row.get("images")),
            _or_blank(row.get("classes")),
            "asked" if doing == "none" else doing,
            _ago(row.get("last_seen")),
            printable(row.get("device") or ""),
        )
    out.print(table)


def _or_blank(value: Any) -> str:
    return "" if value is None else str(value)


def _ago(moment: float | None) -> str:
    if moment is None:
        return "never"
    seconds = max(0, int(time.time() - moment))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


def show_rounds(rows: list[dict[str, Any]]) -> None:
    """Print rounds as a table; wire bytes are predicted unless they say otherwise."""
    table = Table(box=None, pad_edge=False)
    for title in ("seq", "task", "kind", "round", "outcome"):
        table.add_column(title)
    for title in ("asked", "counted", "seconds", "wire up", "wire down"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            str(row["seq"]),
            str(row["task"]),
            row["kind"],
            str(row["round"]),
            row["outcome"],
            str(row["asked"]),
            str(row["counted"]),
            f"{row['seconds']:.1f}",
            format_bytes(row["wire_up"]),
            format_bytes(row["wire_down"]),
        )
    out = _console()
    out.print(table if rows else "no round yet")
    if rows:
        out.print("wire: TCP payload by the exact ZMTP + CURVE formula (predicted)", style="dim")


def show_report(ledger: Ledger, run: RunId, folder: Path) -> None:
    """Print a run's numbers and where its files are."""
    out = Console(highlight=False, markup=False)
    for table in summary_tables(ledger, run):
        out.print(table)
    out.print(f"files: {folder}/report.html, summary.json, rounds.jsonl, ...", soft_wrap=True)


def describe_method(method: Method) -> dict[str, Any]:
    """Return a method's manifest as plain data."""
    options = {
        name: {
            "default": _plain(field.get_default(call_default_factory=True)),
            "help": field.description or "",
        }
        for name, field in method.hparams.model_fields.items()
    }
    return {
        "name": method.name,
        "version": method.version,
        "title": method.title,
        "citation": method.citation,
        "presets": {k: {o: _plain(x) for o, x in v.items()} for k, v in method.presets.items()},
        "options": options,
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def show_methods(rows: list[dict[str, Any]]) -> None:
    """Print methods with their options."""
    out = _console()
    for row in rows:
        out.print(f"{row['name']} {row['version']}: {row['title']}", style="bold", markup=False)
        out.print(f"  {row['citation']}", markup=False)
        for name, preset in row["presets"].items():
            out.print(f"  preset {name}: {preset}", markup=False)
        table = Table(box=None, pad_edge=False)
        for title in ("  option", "default", "meaning"):
            table.add_column(title)
        for name, option in row["options"].items():
            table.add_row(f"  {name}", str(option["default"]), option["help"])
        out.print(table)
