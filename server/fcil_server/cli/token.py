"""``fcil-server token``: tokens of the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption, verbs_in_panels
from fcil_protocol.process.terminal import Format, chosen, emit
from fcil_server.cli.members import check_new_file
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, errors, with_dir

app = typer.Typer(cls=verbs_in_panels({}), help="Tokens of the HTTP API.", no_args_is_help=True)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="The program that will use the token.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    role: Annotated[
        str,
        typer.Option(
            help="read; operate: also rounds and classes; administer: also members.",
            metavar="read|operate|administer",
        ),
    ] = "read",
    expires: Annotated[
        str | None,
        typer.Option(
            help="How long the token is valid: 12h, 30d.", show_default="it does not expire"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the token into this file (0600), not to stdout.")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Make a token that lets one program use the HTTP API; it is shown once."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.storage.atomic_files import write_atomic
        from fcil_server.federation.operator_text import seconds

        if out is not None:
            check_new_file(out)
        lasts_s = None if expires is None else seconds(expires)
        made = _change(directory, "token_new", {"name": name, "role": role, "lasts_s": lasts_s})
        text = str(made["token"])
        if out is not None:
            write_atomic(out, text.encode("ascii") + b"\n")
            made["file"] = str(out)
            del made["token"]
        emit(made, form, lambda: typer.echo(text) if out is None else None)
        typer.echo("The token is shown once; send it as: Authorization: Bearer TOKEN", err=True)


@app.command("ls")
def ls(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List the tokens with their roles, without their secrets."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        import time

        from fcil_server.federation.api_tokens import read_tokens
        from fcil_server.federation.directory import find_directory

        now = time.time()
        rows = [token.row(now) for token in read_tokens(find_directory(directory))]
        emit({"tokens": rows}, form, lambda: _show(directory, rows), rows=rows)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="The token's name.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Revoke a token now: its next request is refused."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        gone = _change(directory, "token_revoke", {"name": name})
        emit(gone, form, lambda: None)
        typer.echo(f"The token {gone['name']} is revoked.", err=True)


def _change(directory: Path, op: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Ask the running server for a change, or make it in its stopped directory."""
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.daemon.api_access import change_tokens
    from fcil_server.federation.directory import find_directory, operator, stopped_ledger

    find_directory(directory)
    try:
        return control_socket.ask(directory, op, **fields)
    except Unreachable:
        with stopped_ledger(directory) as ledger:
            return change_tokens(directory, ledger, op, fields, operator())


def _show(directory: Path, rows: list[dict[str, Any]]) -> None:
    from fcil_protocol.formats import day
    from fcil_protocol.process.tables import Column, console, show_table

    out = console()
    if not rows:
        none = "no token yet; make one with: fcil-server token new NAME"
        out.print(with_dir(none, directory))
        return

    def until(row: dict[str, Any]) -> str:
        if row["expires_at"] is None:
            return "does not expire"
        return f"{'expires' if row['valid'] else 'expired'} {day(row['expires_at'])}"

    columns = (Column("token", "name"), Column("role"), Column("made", _made), Column("", until))
    show_table(out, rows, columns)


def _made(row: dict[str, Any]) -> str:
    from fcil_protocol.formats import day

    return day(row["made_at"])
