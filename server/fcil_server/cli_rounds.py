"""``fcil-server close-round``, ``pause``, ``resume`` and ``drain``: the operator and the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.options import FormatOption, JsonOption
from fcil_protocol.terminal import Format, chosen, emit, errors
from fcil_server.cli_options import DEFAULT_DIRECTORY, DirOption

app = typer.Typer()


@app.command("close-round")
def close_round(
    directory: DirOption = DEFAULT_DIRECTORY,
    rest_of_task: Annotated[
        bool,
        typer.Option("--rest-of-task", help="The further rounds of its task too, at once."),
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """End the round under way with what has come; with nothing, it is skipped."""
    _ask("close_round", directory, form, json_flag, rest_of_task=rest_of_task)
    typer.echo("The round closes.", err=True)


@app.command()
def pause(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Open no further round until `resume`; the one under way goes on to its end."""
    told = _ask("pause", directory, form, json_flag)
    open_now = "The round under way goes on to its end; then " if told["round_open"] else ""
    typer.echo(f"{open_now or 'From now on '}no round opens: fcil-server resume.", err=True)


@app.command()
def resume(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Let rounds go on after `pause`, or take a `drain` back that is still under way."""
    _ask("resume", directory, form, json_flag)
    typer.echo("Rounds go on.", err=True)


@app.command()
def drain(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Stop the server when the round under way is over; no other one opens.

    A round that comes up short at its deadline goes on when the server is started again.
    """
    told = _ask("drain", directory, form, json_flag)
    when = "when the round under way is over" if told["round_open"] else "now"
    typer.echo(f"The server stops {when}.", err=True)


def _ask(
    op: str,
    directory: Path,
    form: Format,
    json_flag: bool,
    **fields: Any,
) -> dict[str, Any]:
    """Give the running server an order, and show what it says of it."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_protocol import control

        told = control.ask(directory, op, **fields)
        emit(told, form, lambda: None)
    return told
