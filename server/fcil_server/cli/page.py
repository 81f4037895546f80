"""``fcil-server page``: links that let a browser in, and the end of all sessions."""

from __future__ import annotations

import contextlib
import html
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, emit
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, ask, errors, with_dir

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext

app = typer.Typer()

OPENING_S = 10.0  # for a browser to read the file that leads it to the page
_LEADS = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={url}">'


@app.command()
def page(
    directory: DirOption = DEFAULT_DIRECTORY,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the link in this user's browser.")
    ] = False,
    sign_out: Annotated[
        bool, typer.Option("--sign-out", help="Sign out all browsers and void all links.")
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Print a link that signs one browser in to the dashboard; valid once, for 24 hours."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_server.federation.directory import find_directory

        find_directory(directory)
        if sign_out and open_it:
            raise UsageError("--open and --sign-out do not go together.", action="Give one.")
        if sign_out:
            _sign_out(directory)
            emit({"signed_out": True}, form, lambda: None)
            ended = "All sessions have ended. For a new link: fcil-server page"
            typer.echo(with_dir(ended, directory), err=True)
            return
        told = ask(directory, "page_link")
        if open_it and _opened(told["url"]):
            emit({"opened": True}, form, lambda: None)
            return
        emit(told, form, lambda: typer.echo(told["url"]))
        if open_it:
            typer.echo("No browser could be opened here.", err=True)
        typer.echo("The link signs in one browser, once, within 24 hours.", err=True)


def _sign_out(directory: Path) -> None:
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.federation.directory import operator, stopped_ledger
    from fcil_server.federation.page_key import renew_key

    try:
        control_socket.ask(directory, "page_sign_out")
    except Unreachable:
        with stopped_ledger(directory) as ledger:
            renew_key(directory)
            ledger.audit.add(operator(), "page_sign_out")


def _opened(url: str) -> bool:
    """Lead this user's browser to a link, and say whether there is one.

    By a file of this user's alone: other users see what a program is called with.
    """
    import webbrowser

    with _leading_to(url) as file:
        if not webbrowser.open(file.as_uri()):
            return False
        time.sleep(OPENING_S)
    return True


@contextlib.contextmanager
def _leading_to(url: str) -> Iterator[Path]:
    from fcil_protocol.storage.atomic_files import write_atomic

    with tempfile.TemporaryDirectory(prefix="fcil-page-") as folder:
        file = Path(folder) / "page.html"
        write_atomic(file, _LEADS.format(url=html.escape(url)).encode(), sync=False)
        yield file


def show_first_link(context: ServerContext) -> None:
    """Print the first sign-in link of a server with a dashboard, if stderr is a terminal.

    It goes there directly: a link in a log would let in every reader of the log.
    """
    from fcil_protocol.errors import FcilError
    from fcil_server.daemon.page_access import page_link
    from fcil_server.federation.directory import operator

    if not context.page.served or not sys.stderr.isatty():
        return
    try:
        told = page_link(context, operator())
    except FcilError as error:  # a disk that is full for its audit: no reason not to serve
        typer.echo(f"There is no link to the dashboard: {error}", err=True)
    else:
        typer.echo(f"A link to the dashboard, valid once, within 24 hours: {told['url']}", err=True)
