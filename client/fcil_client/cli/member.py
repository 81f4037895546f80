"""``fcil-client leave`` and ``rotate-keys``: a member's commands about its membership."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_client.cli.target_options import ServerOption, SlotOption
from fcil_protocol.errors import Unreachable, UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, emit, errors, printable

if TYPE_CHECKING:
    from fcil_client.state.home import Enrolment, Home

_ALONE = (
    "Nothing was removed. Start the server and try again; if it is gone permanently, give "
    "--without-server."
)


def leave(
    data: Annotated[Path, typer.Option(help="The folder whose client leaves.")],
    server: ServerOption = None,
    slot: SlotOption = None,
    without_server: Annotated[
        bool,
        typer.Option(
            "--without-server", help="Remove the files even if no server can be notified."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Leave the federation for good: tell the server, and remove keys and caches.

    Images stay, and the records of what left this device. What the server has averaged into the
    model stays in it. To come back, join with a new ticket.
    """
    form = chosen(form, json_flag)
    with errors(form):
        import asyncio

        from fcil_client.link.visit import stop_daemon
        from fcil_client.membership import leave as leaving
        from fcil_client.membership.enrol import with_current_addresses

        home, enrolment = enrolled(data, server, slot)
        _confirm(enrolment, yes=yes)
        with stop_daemon(home):
            if not without_server:
                enrolment = with_current_addresses(home, enrolment) or enrolment
                try:
                    asyncio.run(leaving.notify_server(home, enrolment))
                except Unreachable as error:
                    error.action = _ALONE
                    raise
            kept = leaving.clear(home)
        data_kept = {"name": enrolment.name, "kept": [str(path) for path in kept]}
        emit(data_kept, form, lambda: None)
        name = printable(enrolment.name)
        typer.echo(f"{name} has left; its keys and caches are removed.", err=True)
        for path in kept:
            typer.echo(f"The journal of what left this device stays: {path}", err=True)


def _confirm(enrolment: Enrolment, *, yes: bool) -> None:
    """Ask whether the client is to leave.

    Raises:
        UsageError: there is no terminal to ask on.
        typer.Abort: it is not.
    """
    if yes:
        return
    name = printable(enrolment.name)
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{name} would leave its federation permanently, and there is no terminal to ask for "
            "confirmation.",
            action="Give --yes.",
        )
    typer.confirm(f"Take {name} out of its federation permanently?", abort=True, err=True)


def rotate_keys(
    data: Annotated[Path, typer.Option(help="The folder whose client gets new keys.")],
    server: ServerOption = None,
    slot: SlotOption = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Give the client new keys; it stays the same member. Start its daemon again afterwards."""
    form = chosen(form, json_flag)
    with errors(form):
        import asyncio

        from fcil_client.link.visit import stop_daemon
        from fcil_client.membership.enrol import with_current_addresses
        from fcil_client.membership.rotate_keys import rotate

        home, enrolment = enrolled(data, server, slot)
        with stop_daemon(home):
            enrolment = with_current_addresses(home, enrolment) or enrolment
            keys = asyncio.run(rotate(home, enrolment))
        emit({"name": enrolment.name, "fingerprint": keys.fingerprint}, form, lambda: None)
        typer.echo(f"{printable(enrolment.name)} now has the key {keys.fingerprint}.", err=True)


def enrolled(data: Path, server: str | None, slot: str | None) -> tuple[Home, Enrolment]:
    from fcil_client.membership.enrol import find_member

    found = find_member(data, server, slot)
    if found is None:
        raise UsageError(
            f"{data} is not enrolled with a federation.",
            action="See which folders are: fcil-client status",
        )
    return found
