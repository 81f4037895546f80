"""``fcil-server run submit``, ``queue`` and ``cancel``: runs that begin one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit
from fcil_server.cli.completion import complete_setting
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, errors, with_dir
from fcil_server.cli.serve_options import PartitionOption

ANSWER_S = 300.0  # longest wait: the server lists the images of `run.central_test`
_PATHS = ("weights", "init_from", "central_test")  # of [run]: files of whoever submits


def submit(
    file: Annotated[
        Path | None,
        typer.Argument(help="A TOML file with sections of one run: [method], [tasks], [run], ..."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--set",
            help="A setting of the run: section.key=value.",
            autocompletion=complete_setting,
        ),
    ] = None,
    partition: PartitionOption = None,
    title: Annotated[str, typer.Option(help="A name for the run; default: the file's.")] = "",
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Let a run begin once those before it are complete or stopped; clients stay members."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_server.federation.config import merged
        from fcil_server.federation.partition_plan import plan_settings, read_plan

        plan = None if partition is None else read_plan(partition)
        tasks = () if plan is None else plan_settings(plan)
        given = (*tasks, *(settings or ()))
        if file is None and not given:
            raise UsageError(
                "there is nothing to submit.", action="Give a TOML file, -c or --partition."
            )
        sections = _with_absolute_paths(merged(file, given))
        named = title or (file.stem if file else "")
        about = {} if plan is None else {"partition": plan.to_fields()}
        told = _ask(directory, "submit_run", title=named, settings=sections, **about)
        emit(told, form, lambda: None)
        typer.echo(with_dir(_describe(told), directory), err=True)


def queue(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List the runs that wait, in the order in which they begin."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import find_directory
        from fcil_server.runs.run_queue import describe_waiting

        rows = describe_waiting(find_directory(directory))
        emit({"queue": rows}, form, lambda: _show(rows, directory), rows=rows)


def cancel(
    number: Annotated[int, typer.Argument(help="The run's number in the queue.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Remove a waiting run from the queue; one that has begun is ended by `run stop`."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        told = _ask(directory, "cancel_run", number=number)
        emit(told, form, lambda: None)
        typer.echo(f"Run {told['number']} is cancelled.", err=True)


def _show(rows: list[dict[str, Any]], directory: Path) -> None:
    from fcil_protocol.formats import ago
    from fcil_protocol.process.tables import Column, console, show_table
    from fcil_protocol.process.terminal import printable

    out = console()
    if not rows:
        none = "no run waits; submit one with: fcil-server run submit FILE"
        out.print(with_dir(none, directory))
        return
    columns = (
        Column("number"),
        Column("title"),
        Column("method", lambda row: row["method"] or "the federation's"),
        Column("submitted", lambda row: ago(row["submitted_at"])),
        Column("by"),
        Column("state", lambda row: "refused" if row["refused"] else "waits"),
    )
    show_table(out, rows, columns)
    for row in rows:
        if row["refused"]:
            out.print(printable(f"run {row['number']}: {row['refused']}"))


def _with_absolute_paths(sections: dict[str, Any]) -> dict[str, Any]:
    """Name the submitter's files so that the server finds them from its own directory."""
    run = sections.get("run")
    if not isinstance(run, dict):
        return sections
    found = {
        key: str(Path(value).absolute())
        for key in _PATHS
        if isinstance(value := run.get(key), str) and value and Path(value).exists()
    }
    return {**sections, "run": {**run, **found}}


def _ask(directory: Path, op: str, **fields: Any) -> dict[str, Any]:
    """Send a command to the server, or carry it out if none runs."""
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.federation.config import load
    from fcil_server.federation.directory import CONFIG, find_directory, operator, stopped_ledger
    from fcil_server.federation.environment import environment_settings
    from fcil_server.runs import run_queue

    find_directory(directory)
    try:
        return control_socket.ask(directory, op, ANSWER_S, **fields)
    except Unreachable:
        actor = operator()
        with stopped_ledger(directory) as ledger:
            if op == "cancel_run":
                entry = run_queue.cancel(directory, fields)
                ledger.audit.add(actor, op, entry.name)
                return {"number": entry.number, "title": entry.title}
            config = load(directory / CONFIG, environment_settings())
            entry = run_queue.submit(directory, config, fields, actor)
            ledger.audit.add(actor, op, entry.name)
            return {**run_queue.describe_submitted(directory, entry), "begins": None}


def _describe(told: dict[str, Any]) -> str:
    number, before = told["number"], told["before"]
    if told["begins"]:
        return f"Run {number} begins."
    if told["begins"] is None:
        first = "once the server is started: fcil-server serve"
        return f"Run {number} waits; it begins {first if not before else _after(before)}."
    return f"Run {number} waits; it begins {_after(before)}."


def _after(before: int) -> str:
    others = f" and {count_of(before, 'other')}" if before else ""
    return f"after the present run{others}"
