"""``fcil-server enrol``, ``clients`` and ``revoke``: membership."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, emit
from fcil_server.cli.completion import complete_member
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, errors

app = typer.Typer()


def check_new_file(path: Path) -> None:
    """Refuse to write a ticket over something, before it is issued.

    Raises:
        UsageError: there is a file, or no folder for it.
    """
    from fcil_protocol.errors import UsageError

    if path.is_symlink() or path.exists():
        raise UsageError(f"{path} exists already.", action="Give --out a new name.")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}.", action="Make it first.")


@app.command()
def enrol(
    name: Annotated[str, typer.Argument(help="The new client's name.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    expires: Annotated[
        str, typer.Option(help="How long the ticket is valid: 30m, 24h, 7d.")
    ] = "24h",
    out: Annotated[
        Path | None, typer.Option(help="Write the ticket into this file (0600), not to stdout.")
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Also draw the ticket as a QR code.")] = False,
    relay: Annotated[
        bool, typer.Option("--relay", help="Enrol a relay for a site, not a client.")
    ] = False,
    via: Annotated[
        str | None, typer.Option(help="The relay that the new client (or relay) connects to.")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Make a ticket that lets one new client (or relay) join, once, from any machine.

    The ticket holds a secret: hand it over as you would a key. A newer ticket of the same name
    makes an older one useless.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_protocol.storage.atomic_files import write_atomic
        from fcil_server.federation.operator_text import local_only_warning, seconds, start_command

        if qr and form is not Format.TEXT:
            raise UsageError("--qr draws on a terminal; it does not go with --json.")
        asked = {"name": name, "lasts_s": seconds(expires), "relay": relay, "via": via}
        if out is not None:
            check_new_file(out)
        issued = _issue(directory, asked)
        text = str(issued["ticket"])
        if out is not None:
            write_atomic(out, text.encode("ascii") + b"\n")
            issued["file"] = str(out)
            del issued["ticket"]
        warning = local_only_warning(issued["addresses"])
        if warning:
            typer.echo(f"warning: {warning}", err=True)

        def show() -> None:
            if out is None:
                typer.echo(text)
            if qr:
                _draw(text)
            file = shlex.quote(str(out)) if out is not None else "FILE (or - for stdin)"
            typer.echo(f"On the device: {start_command(file, relay=relay)}", err=True)
            typer.echo(f"Server key: {issued['fingerprint']}", err=True)

        emit(issued, form, show)


def _issue(directory: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Ask the running server for a ticket, or make one in its stopped directory."""
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.federation.directory import find_directory, operator

    find_directory(directory)
    try:
        return control_socket.ask(directory, "enrol", **asked)
    except Unreachable:
        from fcil_server.daemon.commands import issue_ticket
        from fcil_server.federation.allow_list import AllowList
        from fcil_server.federation.directory import Federation
        from fcil_server.federation.roster import Roster

        with closing(Federation.open_stopped(directory)) as federation:
            roster = Roster(federation, AllowList())
            addresses = federation.config.federation.told()
            return issue_ticket(roster, addresses, asked, operator())


def _draw(text: str) -> None:
    import sys

    import segno

    # Alphanumeric mode: a ticket has capitals and digits only.
    segno.make(text, error="l", micro=False).terminal(sys.stdout, border=2, compact=True)


@app.command("rotate-keys")
def rotate_keys(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Give the stopped server new keys; members learn them when they next connect.

    Replaces the signing and decryption keys; the link key stays, so that clients
    that are offline can find it again.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import Federation, find_directory, operator

        with closing(Federation.open_stopped(find_directory(directory))) as federation:
            federation.rotate_keys(operator())
            fingerprint = federation.keys.public.fingerprint
        emit({"fingerprint": fingerprint}, form, lambda: None)
        typer.echo(f"The server's key is now {fingerprint}.", err=True)


@app.command()
def clients(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List members and open tickets: enrolled, last seen, rounds, bytes, refusals."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import FcilError
        from fcil_protocol.process import control_socket
        from fcil_server.cli.show_members import show_members
        from fcil_server.federation.directory import find_directory
        from fcil_server.federation.members import member_rows, ticket_rows
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

        find_directory(directory)
        try:
            live = {c["id"]: c["state"] for c in control_socket.ask(directory, "status")["clients"]}
        except FcilError:
            live = {}
        with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
            rows, open_tickets = member_rows(ledger, live), ticket_rows(ledger)
        data = {"clients": rows, "tickets": open_tickets}
        emit(data, form, lambda: show_members(rows, open_tickets, directory), rows=rows)


@app.command()
def revoke(
    name: Annotated[
        str,
        typer.Argument(
            help="The client's name, or the first characters of its id.",
            autocompletion=complete_member,
        ),
    ],
    directory: DirOption = DEFAULT_DIRECTORY,
    why: Annotated[str, typer.Option(help="The reason that the client is given.")] = "",
    keep_update: Annotated[
        bool, typer.Option("--keep-update", help="Still count its update to the open round.")
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Revoke a client now: its connection ends and its key is refused from now on.

    Given the name of an open ticket, withdraws the ticket.

    Its update to the open round is excluded, unless you keep it; updates that are averaged
    into states cannot be taken out.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import Unreachable
        from fcil_protocol.process import control_socket
        from fcil_server.federation.allow_list import AllowList
        from fcil_server.federation.directory import Federation, find_directory, operator
        from fcil_server.federation.operator_text import describe_done
        from fcil_server.federation.roster import Roster

        find_directory(directory)
        try:
            reply = control_socket.ask(directory, "revoke", name=name, why=why, keep=keep_update)
        except Unreachable:
            with closing(Federation.open_stopped(directory)) as federation:
                roster, actor = Roster(federation, AllowList()), operator()
                if roster.withdraw(name, actor):
                    reply = {"name": name, "withdrawn": True}
                else:
                    row = roster.named(name)
                    tickets = roster.revoke(row, why, actor, keep=keep_update)
                    behind = roster.behind(row)
                    reply = {"name": row.name, "behind": behind, "tickets": tickets}
        emit({"withdrawn": False, "behind": [], "tickets": [], **reply}, form, lambda: None)
        typer.echo(describe_done("revoke", reply), err=True)
