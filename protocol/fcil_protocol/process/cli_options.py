"""Options of every command, on both sides."""

from __future__ import annotations

from typing import Annotated

import typer

from fcil_protocol.process.defects import own_version
from fcil_protocol.process.terminal import Format

FormatOption = Annotated[Format, typer.Option("--format", help="Form of the data on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
AliveOption = Annotated[
    bool, typer.Option("--alive", help="Fail, with code 2 or 3, where no daemon answers.")
]


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fcil {own_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", is_eager=True, callback=_tell_version, help="Show fcil's version and exit."
    ),
]
