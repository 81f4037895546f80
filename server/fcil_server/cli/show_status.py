"""Output of ``fcil-server status``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from fcil_protocol.errors import Unreachable
from fcil_protocol.formats import ago, format_bytes, loss, percent
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.process.tables import Column, console, show_table
from fcil_protocol.process.terminal import count_of, printable
from fcil_server.cli.options import DEFAULT_DIRECTORY, with_dir
from fcil_server.ledger.labels import GONE, name_with_relay, progress_of, short_device


def _show_relay(out: Console, data: dict[str, Any]) -> None:
    where = "connected" if data["up"] else "not connected"
    out.print(f"relay       {printable(data['relay'])} at {data['address']}", markup=False)
    next_one = "outer relay" if data.get("behind_relay") else "server     "
    out.print(f"{next_one} {data['server']} ({where})", markup=False)
    out.print(f"clients     {data['clients']}")
    size = format_bytes(data["cached_bytes"])
    out.print(f"cache       {count_of(data['cached_chunks'], 'chunk')}, {size}")
    if data.get("adds_up"):  # a relay of an older fcil does not say
        added = count_of(data["added"], "update")
        out.print(f"added up    {added} in {count_of(data['sums'], 'sum')}")


def _show_processes(out: Console, federation: dict[str, Any], directory: Path) -> None:
    """Print what stands beside the server."""
    if federation.get("intake"):
        shares = ", ".join(str(one["connections"]) for one in federation["intake"])
        processes = count_of(len(federation["intake"]), "intake process")
        out.print(f"intake      {processes} with {shares} connections")
    if federation.get("page"):
        link = with_dir("for a sign-in link: fcil-server page", directory)
        out.print(f"dashboard   {federation['page']['address']}; {link}", soft_wrap=True)


def check_alive(data: dict[str, Any]) -> None:
    """Check, for supervisors, that a daemon that answers serves: a relay needs its session.

    Raises:
        Unreachable: it is a relay without a session with its server.
    """
    if "relay" in data and not data["up"]:
        raise Unreachable(
            f"the relay {data['relay']!r} runs, but has no session with the server at "
            f"{data['server']}, so its clients reach nothing.",
            action="Its notes say why; it keeps trying.",
        )


def show_status(data: dict[str, Any], directory: Path = DEFAULT_DIRECTORY) -> None:
    """Print the status of a server or a relay as text; its commands name the directory."""
    out = console()
    if "relay" in data:
        _show_relay(out, data)
        return
    federation, run, now = data["federation"], data["run"], data["now"]
    if data["running"]:
        where = ", ".join(federation["addresses"])
        out.print(f"federation  {printable(federation['name'])} at {where}", markup=False)
    else:
        out.print(f"federation  {federation['directory']} (not running)", markup=False)
    _show_processes(out, federation, directory)
    if run:
        out.print(
            f"run         {run['id']} ({run['status']}), {run['method']} on {run['backbone']}"
            f"{forked_from(run)}"
        )
    if run and "privacy" in run:
        out.print(f"privacy     {PrivacyTerms.model_validate(run['privacy']).describe()}")
    if run and run["best"] is not None:
        best = run["best"]
        what = f"state {best['state']} of task {best['task']}, {percent(best['accuracy'])}"
        out.print(f"best        {what} of all images")
    if run and run["promoted"] is not None:
        out.print(f"promoted    state {run['promoted']}: clients use its model")
    if run and run.get("training"):
        last = run["training"]
        text = f"loss {loss(last['loss'])}"
        if last["accuracy"] is not None:
            text += f", accuracy {percent(100 * last['accuracy'])}"
        out.print(f"training    {text}, task {last['task']} {last['kind']} round {last['round']}")
    if run and run.get("budget"):
        out.print(f"budget      {run['budget']['text'].removeprefix('budget ')}", soft_wrap=True)
    out.print(f"now         {_doing(now)}", markup=False)
    if now["waiting_for"]:
        text = with_dir(printable(now["waiting_for"]), directory)
        out.print(f"waits for   {text}", markup=False)
    _show_clients(out, data["clients"], now.get("answers", {}), directory)
    waiting = [c["name"] for c in data["classes"] if c["waiting"]]
    placed = len(data["classes"]) - len(waiting)
    out.print(f"classes     {placed} in tasks, {len(waiting)} waiting")
    asked = [c["name"] for c in data["classes"] if not c.get("admitted", True)]
    if asked:
        names = ", ".join(printable(n) for n in asked[:8]) + (" ..." if len(asked) > 8 else "")
        out.print(f"to admit    {names}: {with_dir('fcil-server classes admit', directory)}")
    if queue := data["queue"]:
        count, refused = len(queue), sum(bool(entry["refused"]) for entry in queue)
        text = f"{count_of(count - refused, 'run')} waiting"
        text += f", {refused} refused" if refused else ""
        out.print(f"queue       {text}: {with_dir('fcil-server run queue', directory)}")


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


def _show_clients(
    out: Console, clients: list[dict[str, Any]], answers: dict[str, str], directory: Path
) -> None:
    if not clients:
        out.print("clients     none yet; join with: fcil-client join --data FOLDER")
        return
    gone = Counter(row["state"] for row in clients if row["state"] in GONE)
    clients = [row for row in clients if row["state"] not in GONE]
    columns = (
        Column("client", name_with_relay),
        Column("state"),
        Column("images", lambda row: row.get("images")),
        Column("classes", lambda row: row.get("classes")),
        Column("this round", lambda row: _this_round(row, answers.get(row["id"], ""))),
        Column("last seen", lambda row: ago(row.get("last_seen"))),
        Column("device", lambda row: short_device(row.get("device") or ""), wraps=True),
    )
    if clients:
        show_table(out, clients, columns)
    if gone:
        told = ", ".join(f"{count} {state}" for state, count in sorted(gone.items()))
        out.print(f"former      {told}: {with_dir('fcil-server clients', directory)}")
    for row in clients:
        if row.get("why"):
            out.print(f"{printable(row['name'])}: {printable(row['why'])}")
        if row.get("learned_before"):
            names = ", ".join(row["learned_before"][:8])
            text = (
                f"{row['name']}: holds {names}, learned before: serves for tests, not trained again"
            )
            out.print(printable(text))
        if row.get("missed_tasks"):
            tasks = ", ".join(str(t) for t in row["missed_tasks"][:8])
            text = f"{row['name']}: task {tasks} continued without it; it gets the results with"
            out.print(printable(f"{text} its next round"))


def _this_round(row: dict[str, Any], answer: str) -> str:
    if answer != "none":
        return answer
    progress = row.get("progress")
    return progress_of(*progress) + ", paused" * row["paused"] if progress else "asked"
