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
    _order("close_round", directory, form, json_flag, rest_of_task=rest_of_task)


@app.command()
def pause(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Open no further round until `resume`; the one under way goes on to its end."""
    _order("pause", directory, form, json_flag)


@app.command()
def resume(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Let rounds go on after `pause`, or take a `drain` back that is still under way."""
    _order("resume", directory, form, json_flag)


@app.command()
def drain(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Stop the server when the round under way is over; no other one opens.

    A round that comes up short at its deadline goes on when the server is started again.
    """
    _order("drain", directory, form, json_flag)


def _order(
    op: str,
    directory: Path,
    form: Format,
    json_flag: bool,
    **fields: Any,
) -> None:
    """Give the running server an order, and show what it says of it."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_protocol import control
        from fcil_server.orders import said

        told = control.ask(directory, op, **fields)
        emit(told, form, lambda: None)
        typer.echo(said(op, told), err=True)
