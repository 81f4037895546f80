"""``fcil-server classes``: list and change the class names of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption, verbs_in_panels
from fcil_protocol.process.terminal import Format, chosen, emit, say
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, errors

app = typer.Typer(
    cls=verbs_in_panels({}), help="The class names of the newest run.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="A class name of the run.")]


@app.command("ls")
def ls(
    directory: DirOption = DEFAULT_DIRECTORY,
    run: Annotated[
        str | None, typer.Option("--run", help="A run's id, or the first characters of it.")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List class names with their ids, tasks and origin, and the names that wait."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.rounds.class_changes import class_list

        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            found = ledger.runs.named(run).run_id
            rows = class_list(ledger, found)
        emit({"run": found, "classes": rows}, form, lambda: _show(rows), rows=rows)


@app.command()
def admit(
    names: Annotated[
        list[str] | None, typer.Argument(help="Waiting names; none: all of them.")
    ] = None,
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Admit new names to tasks, where `[tasks] admit` is "confirm"."""
    _change(directory, "admit", names or [], form, json_flag, "admitted: ")


@app.command()
def alias(
    name: Annotated[str, typer.Argument(help="The alias.")],
    target: Annotated[str, typer.Argument(help="The class that it means.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Make a name an alias of a class; a name that waits for a task is merged into it."""
    _change(directory, "alias", [name, target], form, json_flag, "these are one class now: ")


@app.command()
def rename(
    name: Name,
    new: Annotated[str, typer.Argument(help="The new name.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Rename a class; it keeps its id, and its old name becomes an alias."""
    _change(directory, "rename", [name, new], form, json_flag, "renamed: ")


@app.command()
def hide(
    names: Annotated[list[str], typer.Argument(help="Class names of the run.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Exclude names from future tasks, and hide them from clients."""
    _change(directory, "hide", names, form, json_flag, "hidden: ")


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Hidden class names of the run.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Undo `hide`."""
    _change(directory, "show", names, form, json_flag, "shown: ")


def _change(
    directory: Path, change: str, names: list[str], form: Format, json_flag: bool, said: str
) -> None:
    form = chosen(form, json_flag)
    with errors(directory, form):
        changed = _apply(directory, {"change": change, "names": names})
        text = said + (", ".join(changed["names"]) or "nothing")
        emit(changed, form, lambda: say(text))


def _apply(directory: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Ask the running server for a change, or make it in its stopped directory."""
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.federation.directory import find_directory, operator, stopped_ledger
    from fcil_server.rounds.class_changes import apply_change
    from fcil_server.rounds.classes import ClassRegistry

    find_directory(directory)
    try:
        return control_socket.ask(directory, "classes", **fields)
    except Unreachable:
        with stopped_ledger(directory) as ledger:
            registry = ClassRegistry(ledger, ledger.runs.named(None).run_id)
            names = apply_change(registry, fields)
            action = f"classes_{fields['change']}"
            ledger.audit.add(operator(), action, ", ".join(names))
            return {"names": names}


def _show(rows: list[dict[str, Any]]) -> None:
    from fcil_protocol.process.tables import Column, console, show_table

    out = console()
    if not rows:
        out.print("no class name yet")
        return
    columns = (
        Column("id"),
        Column("class", "name"),
        Column("task", _where),
        Column("also called", lambda row: ", ".join(row["aliases"]), wraps=True),
        Column("first brought by", "first_seen_by"),
    )
    show_table(out, rows, columns)


def _where(row: dict[str, Any]) -> str:
    hidden = ", hidden" if row["hidden"] else ""
    if row["task"] is not None:
        return f"{row['task']}{hidden}"
    if row["planned_task"] is not None:
        return f"planned for {row['planned_task']}{hidden}"
    return f"waits{hidden}" if row["admitted"] else f"to be admitted{hidden}"
