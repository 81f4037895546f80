"""The text form of what the commands show."""

from __future__ import annotations

import csv
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from fcil_adapters.privacy_terms import describe_terms
from fcil_protocol.ids import RunId
from fcil_protocol.messages import PrivacyTerms
from fcil_protocol.tables import console, show_table, table
from fcil_protocol.terminal import Format, emit, printable
from fcil_server import comparison, rundir
from fcil_server.beside import HEAD
from fcil_server.ledger import LEDGER_NAME, Ledger, run_named
from fcil_server.report_tables import summary_tables
from fcil_server.rundata import collect, format_bytes
from fcil_server.words import ANSWERS, CLOSED_BY, GONE, progress_of, short_device

if TYPE_CHECKING:
    from fcil_server.demo import Demo


def show_status(data: dict[str, Any]) -> None:
    """Print a status as text."""
    out = console()
    federation, run, now = data["federation"], data["run"], data["now"]
    if data["running"]:
        where = ", ".join(federation["addresses"])
        out.print(f"federation  {printable(federation['name'])} at {where}", markup=False)
    else:
        out.print(f"federation  {federation['directory']} (not running)", markup=False)
    if federation.get("page"):
        out.print(f"page        {federation['page']['address']}, by a link of: fcil-server page")
    if run:
        out.print(
            f"run         {run['id']} ({run['status']}), {run['method']} on {run['backbone']}"
            f"{forked_from(run)}"
        )
    if run and "privacy" in run:
        out.print(f"privacy     {describe_terms(PrivacyTerms.model_validate(run['privacy']))}")
    if run and run.get("budget"):
        out.print(f"budget      {run['budget']['text'].removeprefix('budget ')}", soft_wrap=True)
    out.print(f"now         {_doing(now)}", markup=False)
    if now["waiting_for"]:
        out.print(f"waits for   {printable(now['waiting_for'])}", markup=False)
    _show_clients(out, data["clients"], now.get("answers", {}))
    waiting = [c["name"] for c in data["classes"] if c["waiting"]]
    placed = len(data["classes"]) - len(waiting)
    out.print(f"classes     {placed} in tasks, {len(waiting)} waiting")
    asked = [c["name"] for c in data["classes"] if not c.get("admitted", True)]
    if asked:
        names = ", ".join(printable(n) for n in asked[:8]) + (" ..." if len(asked) > 8 else "")
        out.print(f"to admit    {names}: fcil-server classes admit")


def forked_from(run: dict[str, Any]) -> str:
    """Say which run this one was forked from, if any."""
    parent = run.get("parent")
    return f", forked from {parent['run']} at state {parent['state']}" if parent else ""


def _doing(now: dict[str, Any]) -> str:
    if now["kind"] is None:
        return str(now["phase"])
    text = f"{now['phase']}, task {now['task']} {now['kind']} round {now['round']}"
    if now.get("remaining_s") is not None:
        text += f", {now['remaining_s']:.0f} s left"
    mode = now.get("mode", "running")
    return text if mode in ("running", now["phase"]) else f"{text} ({mode})"


def _show_clients(out: Console, clients: list[dict[str, Any]], answers: dict[str, str]) -> None:
    if not clients:
        out.print("clients     none yet; join with: fcil-client join --data FOLDER")
        return
    titles = ("client", "state", "images", "classes", "this round", "last seen", "device")
    shown = table(*titles, wraps=("device",))
    gone = Counter(row["state"] for row in clients if row["state"] in GONE)
    clients = [row for row in clients if row["state"] not in GONE]
    for row in clients:
        progress = row.get("progress")
        doing = answers.get(row["id"], "")
        if doing == "none" and progress:
            doing = progress_of(*progress) + ", paused" * row["paused"]
        shown.add_row(
            printable(row["name"]),
            row["state"],
            _or_blank(row.get("images")),
            _or_blank(row.get("classes")),
            "asked" if doing == "none" else doing,
            ago(row.get("last_seen")),
            printable(short_device(row.get("device") or "")),
        )
    if clients:
        show_table(out, shown)
    if gone:
        told = ", ".join(f"{count} {state}" for state, count in sorted(gone.items()))
        out.print(f"no more     {told}: fcil-server clients")
    for row in clients:
        if row.get("why"):
            out.print(f"{printable(row['name'])}: {printable(row['why'])}")
        if row.get("learned_before"):
            names = ", ".join(row["learned_before"][:8])
            text = f"{row['name']}: holds {names}, learned before: tested, not trained again"
            out.print(printable(text))
        if row.get("missed_tasks"):
            tasks = ", ".join(str(t) for t in row["missed_tasks"][:8])
            text = f"{row['name']}: task {tasks} went on without it; what they left it gets with"
            out.print(printable(f"{text} its next round"))


def _or_blank(value: Any) -> str:
    return "" if value is None else str(value)


def ago(moment: float | None) -> str:
    """Return how long ago a moment was, for people."""
    if moment is None:
        return "never"
    seconds = max(0, int(time.time() - moment))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


def show_rounds(rows: list[dict[str, Any]]) -> None:
    """Print rounds as a table."""
    numbers = ("asked", "counted", "seconds", "wire up", "wire down")
    shown = table("seq", "task", "kind", "round", "outcome", *numbers, right=numbers)
    for row in rows:
        shown.add_row(
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
    out = console()
    if not rows:
        out.print("no round yet")
        return
    show_table(out, shown)
    for row in rows:
        for one in row["excluded"]:
            text = f"round {row['seq']} left out {one['name'] or one['client']}: {one['reason']}"
            out.print(printable(text))
        if remarks := _remarks(row):
            out.print(printable(f"round {row['seq']}: {'; '.join(remarks)}"))
    counted = {row["wire_source"] for row in rows}
    how = "as the kernel counted it" if counted == {"kernel"} else "by the exact formula"
    out.print(f"wire: TCP payload of all clients, {how}", style="dim")


def _remarks(row: dict[str, Any]) -> list[str]:
    """Return what did not go to plan in a round."""
    remarks = [CLOSED_BY[row["closed_by"]]] if row["closed_by"] in CLOSED_BY else []
    if row["reopened"]:
        remarks.append(f"reopened {row['reopened']} x")
    for one in row["answers"][:12]:
        why = f" ({one['reason']})" if one["reason"] else ""
        remarks.append(f"{one['name'] or one['client'][:8]} {ANSWERS[one['answer']]}{why}")
    return [*remarks, *(["..."] if len(row["answers"]) > 12 else [])]


def rounds_csv(rows: list[dict[str, Any]]) -> None:
    """Write rounds as CSV to stdout; what is a list in JSON is its length."""
    lines = csv.writer(sys.stdout, lineterminator="\n")
    names = list(rows[0]) if rows else ["seq"]
    lines.writerow(names)
    for row in rows:
        lines.writerow(len(row[n]) if isinstance(row[n], list) else row[n] for n in names)


def show_comparison(runs: comparison.Named, folder: Path) -> None:
    """Print the headline numbers of several runs, and where the page is."""
    shown = table(*HEAD, right=HEAD[2:])
    for line in comparison.rows(runs):
        shown.add_row(*map(printable, line))
    out = console()
    show_table(out, shown)
    out.print(f"files: {folder}/comparison.html, comparison.csv", soft_wrap=True)


def show_report(ledger: Ledger, run: RunId, folder: Path) -> None:
    """Print a run's numbers and where its files are."""
    out = console()
    for part in summary_tables(ledger, run):
        out.print(part)
    row = ledger.run(run)
    if row is not None and row.environment.get("budget"):
        out.print(row.environment["budget"]["text"], soft_wrap=True)
    out.print(f"files: {folder}/report.html, summary.json, rounds.jsonl, ...", soft_wrap=True)


def show_demo(demo: Demo, form: Format) -> None:
    """Print the numbers of a demo that has come to its end, or give them as JSON."""
    with Ledger(demo.federation / LEDGER_NAME, read_only=True) as ledger:
        run = run_named(ledger, None).run_id

        def show() -> None:
            show_report(ledger, run, demo.federation / "runs" / run)
            typer.echo(f"took {demo.took_s:.0f} s")

        emit(rundir.summary(collect(ledger, run))["data"], form, show)
