"""Output of ``fcil-server methods``: plain data and its text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fcil_adapters.contract import Hparams, Method
from fcil_adapters.contract.traffic import Cadence
from fcil_protocol.process.tables import console, show_table, table
from fcil_server.reports.results.run_data import format_bytes
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.prediction import Traffic, predict

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


def describe_method(method: Method, hparams: Hparams, setting: TrafficSetting) -> dict[str, Any]:
    """Return a method's manifest, its options and its traffic as plain data."""
    return {
        "name": method.name,
        "version": method.version,
        "title": method.title,
        "citation": method.citation,
        "presets": {name: dict(_dotted(preset)) for name, preset in method.presets.items()},
        "options": dict(_options(method.hparams(), hparams)),
        "setting": {
            "backbone": setting.backbone.name if method.needs_backbone else None,
            "dim": setting.backbone.dim if method.needs_backbone else None,
            "classes": setting.classes,
            "past": setting.past,
            "clients": setting.clients,
            "rounds": setting.rounds,
        },
        "traffic": _traffic_fields(predict(method, hparams, setting)),
    }


def _dotted(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield before + name, _plain(value)


def _options(
    defaults: Hparams, values: Hparams, before: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every option by its dotted name: default, value here, meaning."""
    for name, field in type(values).model_fields.items():
        default, value = getattr(defaults, name), getattr(values, name)
        if isinstance(value, Hparams):
            yield from _options(default, value, f"{before}{name}.")
        else:
            meaning = field.description or ""
            fields = {"default": _plain(default), "value": _plain(value), "help": meaning}
            yield before + name, fields


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _traffic_fields(traffic: Traffic) -> dict[str, Any]:
    return {
        "up": [
            {"exchange": up.exchange, "rounds": up.rounds, **up.size.fields()} for up in traffic.up
        ],
        "down": [
            {
                "part": down.part,
                "cadence": down.cadence.value,
                "every": down.every,
                **down.each.fields(),
                "task_bytes": down.task.bytes,
                "missed_bytes": down.missed.bytes,
            }
            for down in traffic.down
        ],
        "round": {"up": traffic.round[0].fields(), "down": traffic.round[1].fields()},
        "task": {"up": traffic.task[0].fields(), "down": traffic.task[1].fields()},
        "missed": traffic.missed.fields(),
    }


def show_methods(rows: list[dict[str, Any]]) -> None:
    """Print one line per method, and the papers."""
    out = console()
    numbers = ("up a round", "down a round")
    shown = table("method", "kinds", *numbers, right=numbers, wraps=("kinds",))
    for row in rows:
        each = row["traffic"]["round"]
        kinds = ", ".join({**each["up"]["kinds"], **each["down"]["kinds"]})
        shown.add_row(row["name"], kinds, _short(each["up"]), _short(each["down"]))
    show_table(out, shown)
    out.print()
    for row in rows:
        out.print(f"{row['name']}: {row['title']}. {row['citation']}", style="dim")
    out.print()
    for row in rows:
        _show_budget(out, row)
    out.print(f"{_of(rows)}; <= is at most.")
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
    show_table(out, _options_table(row["options"]))


def _show_budget(out: Console, row: dict[str, Any]) -> None:
    budget = row["budget"]
    if budget is not None:
        verdict = "" if budget["fits"] else "does not fit: "
        out.print(f"{row['name']}: {verdict}{budget['text']}")


def _show_traffic(out: Console, traffic: dict[str, Any]) -> None:
    shown = table("", "when", "bytes", "of which", right=("bytes",), wraps=("when", "of which"))
    for up in traffic["up"]:
        times = f"{up['rounds']} round{'s' if up['rounds'] != 1 else ''} a task"
        shown.add_row(f"up    {up['exchange']}", times, _exact(up), _kinds(up))
    for down in traffic["down"]:
        shown.add_row(f"down  {down['part']}", _when(down), _exact(down), _kinds(down))
    show_table(out, shown)
    task = traffic["task"]
    out.print(f"the whole task: {_exact(task['up'])} up, {_exact(task['down'])} down")


def _when(down: dict[str, Any]) -> str:
    if down["cadence"] != Cadence.BASE:
        return _WHEN[Cadence(down["cadence"])]
    every = down["every"]
    return "each round" if every == 1 else f"every {every} rounds, in place of the log"


def _options_table(options: dict[str, Any]) -> Table:
    shown = table("option", "default", "meaning", wraps=("default", "meaning"))
    for name, option in options.items():
        default = str(option["default"])
        if option["value"] != option["default"]:
            default = f"{default} (here {option['value']})"
        shown.add_row(name, default, option["help"])
    return shown


def _exact(size: dict[str, Any]) -> str:
    return f"{'<= ' if size['at_most'] else ''}{size['bytes']:,}"


def _short(size: dict[str, Any]) -> str:
    return f"{'<= ' if size['at_most'] else ''}{format_bytes(size['bytes'])}"


def _kinds(size: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in size["kinds"].items())
