"""The text form of ``fcil-server methods``."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from fcil_adapters.contract.traffic import Cadence
from fcil_protocol.formats import format_bytes
from fcil_protocol.process.tables import Column, console, show_table

_WHEN = {
    Cadence.ROUND: "each round",
    Cadence.COUNTED: "after each round",
    Cadence.LOG: "one more each round",
    Cadence.TASK: "for each finished task",
    Cadence.OWN: "each round, kept after its task",
    Cadence.TRAINED: "each training round",
    Cadence.OPENING: "once a task",
    Cadence.LEARNED: "each training round",
    Cadence.FINISHED: "once a task",
    Cadence.CLOSED: "for each finished task",
    Cadence.RUN: "once",
}


def show_methods(rows: list[dict[str, Any]]) -> None:
    """Print the papers, and then one line per method: the table stays on the screen."""
    out = console()
    for row in rows:
        out.print(f"{row['name']}: {row['title']}. {row['citation']}", style="dim")
    out.print()
    for row in rows:
        _show_budget(out, row)
    show_table(out, rows, _METHODS)
    out.print()
    out.print(f"{_of(rows)}; <= is at most.")
    out.print("masks: the server can sum its updates unseen (privacy.secure = 'masks').")
    out.print("Name one for all it sends, its presets and options: fcil-server methods NAME")


def _of(rows: list[dict[str, Any]]) -> str:
    """Print the setting for which the methods' numbers hold."""
    own = next((row["setting"] for row in rows if row["setting"]["backbone"]), rows[0]["setting"])
    on = f" on {own['backbone']} (width {own['dim']})" if own["backbone"] else ""
    classes = f"{own['classes']} class{'es' if own['classes'] != 1 else ''}"
    return (
        f"Bytes of tensors for one of {own['clients']} client"
        f"{'s' if own['clients'] != 1 else ''}{on}: tasks of {classes}, {own['past']} before, "
        f"{own['rounds']} rounds"
    )


def show_method(row: dict[str, Any]) -> None:
    """Print all details of one method."""
    out = console()
    out.print(f"{row['name']} {row['version']}: {row['title']}", style="bold")
    out.print(row["citation"])
    can = "can" if row["masks"] else "cannot"
    out.print(f"its rounds {can} be masked (privacy.secure)")
    _show_budget(out, row)
    out.print(f"\n{_of([row])}; <= is at most.")
    _show_traffic(out, row["traffic"])
    if row["setting"]["past"]:
        missed = _exact(row["traffic"]["missed"])
        out.print(f"a client that joins in this task fetches {missed} more, of earlier tasks\n")
    else:
        out.print("later tasks, and the cost of joining in them: --past CLASSES\n")
    for name, preset in row["presets"].items():
        chosen = ", ".join(f"{option} = {value}" for option, value in preset.items())
        out.print(f"preset {name}: {chosen}")
    show_table(out, row["options"].items(), _OPTIONS)


def _show_budget(out: Console, row: dict[str, Any]) -> None:
    budget = row["budget"]
    if budget is not None:
        verdict = "" if budget["fits"] else "does not fit: "
        out.print(f"{row['name']}: {verdict}{budget['text']}")


def _show_traffic(out: Console, traffic: dict[str, Any]) -> None:
    show_table(out, [*traffic["up"], *traffic["down"]], _TRAFFIC)
    task = traffic["task"]
    out.print(f"the whole task: {_exact(task['up'])} up, {_exact(task['down'])} down")


def _what(sent: dict[str, Any]) -> str:
    return f"up    {sent['exchange']}" if "exchange" in sent else f"down  {sent['part']}"


def _when(sent: dict[str, Any]) -> str:
    if "exchange" in sent:
        return f"{sent['rounds']} round{'s' if sent['rounds'] != 1 else ''} a task"
    if sent["cadence"] != Cadence.BASE:
        return _WHEN[Cadence(sent["cadence"])]
    every = sent["every"]
    return "each round" if every == 1 else f"every {every} rounds, in place of the log"


def _default(option: dict[str, Any]) -> str:
    default, value = option["default"], option["value"]
    return str(default) if value == default else f"{default} (here {value})"


def _exact(size: dict[str, Any]) -> str:
    return f"{'<= ' if size['at_most'] else ''}{size['bytes']:,}"


def _short(size: dict[str, Any]) -> str:
    return f"{'<= ' if size['at_most'] else ''}{format_bytes(size['bytes'])}"


def _kinds(size: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in size["kinds"].items())


def _all_kinds(row: dict[str, Any]) -> str:
    each = row["traffic"]["round"]
    return ", ".join({**each["up"]["kinds"], **each["down"]["kinds"]})


_METHODS = (
    Column("method", "name"),
    Column("masks", lambda row: "yes" if row["masks"] else "no"),
    Column("kinds", _all_kinds, wraps=True),
    Column("up a round", lambda row: _short(row["traffic"]["round"]["up"]), right=True),
    Column("down a round", lambda row: _short(row["traffic"]["round"]["down"]), right=True),
)
_TRAFFIC = (
    Column("", _what),
    Column("when", _when, wraps=True),
    Column("bytes", _exact, right=True),
    Column("of which", _kinds, wraps=True),
)
_OPTIONS = (
    Column("option", 0),
    Column("default", lambda named: _default(named[1]), wraps=True),
    Column("meaning", lambda named: named[1]["help"], wraps=True),
)
