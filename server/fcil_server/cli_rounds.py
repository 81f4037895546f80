"""``fcil-server close-round``, ``pause``, ``resume`` and ``drain``: the operator and the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.terminal import errors

app = typer.Typer()

DirOption = Annotated[Path, typer.Option("--dir", help="The federation's directory.")]
DEFAULT_DIRECTORY = Path("federation")


@app.command("close-round")
def close_round(
    directory: DirOption = DEFAULT_DIRECTORY,
    rest_of_task: Annotated[
        bool,
        typer.Option("--rest-of-task", help="The further rounds of its task too, at once."),
    ] = False,
) -> None:
    """End the round under way with what has come; with nothing, it is skipped."""
    with errors():
        from fcil_protocol import control

        control.ask(directory, "close_round", rest_of_task=rest_of_task)
        typer.echo("The round closes.", err=True)


@app.command()
def pause(directory: DirOption = DEFAULT_DIRECTORY) -> None:
    """Open no further round until `resume`; the one under way goes on to its end."""
    with errors():
        from fcil_protocol import control

        told = control.ask(directory, "pause")
        open_now = "The round under way goes on to its end; then " if told["round_open"] else ""
        typer.echo(f"{open_now or 'From now on '}no round opens: fcil-server resume.", err=True)


@app.command()
def resume(directory: DirOption = DEFAULT_DIRECTORY) -> None:
    """Let rounds go on after `pause`, or take a `drain` back that is still under way."""
    with errors():
        from fcil_protocol import control

        control.ask(directory, "resume")
        typer.echo("Rounds go on.", err=True)


@app.command()
def drain(directory: DirOption = DEFAULT_DIRECTORY) -> None:
    """Stop the server when the round under way is over; no other one opens.

    A round that comes up short at its deadline goes on when the server is started again.
    """
    with errors():
        from fcil_protocol import control

        told = control.ask(directory, "drain")
        when = "when the round under way is over" if told["round_open"] else "now"
        typer.echo(f"The server stops {when}.", err=True)
