"""``fcil-server forget`` and ``erase``: take a client out of a run, or out of the federation."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit, printable, say
from fcil_server.cli.completion import complete_client
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, RunOption, errors, with_dir

if TYPE_CHECKING:
    from fcil_server.runs.forget import Forgotten

app = typer.Typer()

ERASE_S = 300.0  # tables and plots of all runs are written anew

NameArgument = Annotated[
    str,
    typer.Argument(
        help="The client's name, or the first characters of its id.",
        autocompletion=complete_client,
    ),
]


@app.command()
def forget(
    name: NameArgument,
    directory: DirOption = DEFAULT_DIRECTORY,
    run: RunOption = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Also end its membership.")] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Continue as if a client had never taken part: a new run without it replaces the old states.

    Exact, or refused: for methods whose clients do not train (analytic, fedncm,
    gaussian_head, running_mean; adapt_once for a client that did not), in runs that keep
    updates (-c run.keep_updates=true).
    The server must be stopped; when it starts again, it and its clients continue the new run.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        import asyncio

        from fcil_server.federation.directory import Federation, find_directory, operator
        from fcil_server.runs.forget_offline import forget as do

        def note(_level: str, _code: str, text: str) -> None:
            say(text)

        with closing(Federation.open_stopped(find_directory(directory))) as federation:
            actor = operator()
            work = do(federation, name, run, actor=actor, notify=note, revoke=revoke)
            done = asyncio.run(work)
        data = {**asdict(done), "revoked": revoke}
        emit(data, form, lambda: _show_forgotten(done, directory, revoked=revoke))


def _show_forgotten(done: Forgotten, directory: Path, *, revoked: bool) -> None:
    tasks = ", ".join(map(str, done.tasks))
    name = printable(done.name)
    images = count_of(done.images, "image")
    of_them = f"{'task' if len(done.tasks) == 1 else 'tasks'} {tasks}"
    what = f"{count_of(done.updates, 'update')} ({images}, {of_them})"
    removed = f"states, stored updates and parts of {', '.join(done.emptied)}"
    lines = [
        f"run {done.run} continues without {name}, from state {done.state} of {done.parent}:",
        f"as if its {what} had never arrived.",
        f"Removed: {removed}; their tables stay.",
    ]
    if done.vanished:
        listed = ", ".join(map(printable, done.vanished))
        lines.append(f"Classes that no other client had images of: {listed}; no model names them "
                     "until a client brings images; `classes hide` hides the names.")  # fmt: skip
    lines += [f"Left out now: {printable(who)}: {printable(why)}" for who, why in done.left_out]
    lines += [
        f"Run {other} still holds {count_of(n, 'update')} of it: "
        f"fcil-server forget {name} --run {other}"
        for other, n in done.elsewhere.items()
    ]
    if done.overtaken is not None:
        other, state = done.overtaken
        lines.append(f"The next `serve` continues {done.run}, not {other}; to continue that one: "
                     f"fcil-server run rollback {other} --to-state {state}")  # fmt: skip
    lines.append(
        "Not taken back: broadcasts that clients have, exported models, backups, accuracies that "
        "were measured with it."
    )
    if revoked:
        lines.append(f"{name} is revoked.")
    elif done.member:
        lines.append(f"{name} stays a member: it is not asked for those tasks again, but for later "
                     f"ones it is; to end that: fcil-server revoke {name}")  # fmt: skip
    else:
        lines.append(f"{name} was no member any more.")
    for line in lines:
        typer.echo(with_dir(line, directory))


@app.command()
def erase(
    name: NameArgument,
    directory: DirOption = DEFAULT_DIRECTORY,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Delete what the server holds about a member: name, keys, tests, notes, stored updates.

    Ends its membership. Reports what cannot be deleted, such as its part in averages: where a run
    keeps updates, `forget` it first. Works whether or not the server runs.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_server.federation.directory import find_directory
        from fcil_server.federation.roster import ever_named
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.runs.erase import preview_erasure

        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            row = ever_named(ledger, name)
            lines = preview_erasure(ledger, directory, row)
        for line in lines:
            say(with_dir(f"{line}.", directory))
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(
                    f"{row.name!r} would be erased permanently, and there is no terminal to ask "
                    "for confirmation.",
                    action="Give --yes.",
                )
            typer.confirm(f"Erase {printable(row.name)} permanently?", abort=True, err=True)
        done = _erase(directory, row.client_id)
        emit(done, form, lambda: _show_erased(done, directory))


def _erase(directory: Path, client: str) -> dict[str, Any]:
    """Ask the running server, or do it in its stopped directory."""
    from fcil_protocol.errors import Unreachable
    from fcil_protocol.process import control_socket
    from fcil_server.federation.allow_list import AllowList
    from fcil_server.federation.directory import Federation, operator
    from fcil_server.federation.roster import Roster, ever_named
    from fcil_server.runs.erase import erase as do
    from fcil_server.runs.erase import tidy

    try:
        return control_socket.ask(directory, "erase", ERASE_S, name=client)
    except Unreachable:
        with closing(Federation.open_stopped(directory)) as federation:
            row = ever_named(federation.ledger, client)
            roster = Roster(federation, AllowList())
            done = do(roster, directory, row, operator())
            more = tidy(federation.ledger.path, directory, done)
        return {**asdict(done), "stays": [*done.stays, *more]}


def _show_erased(done: dict[str, Any], directory: Path) -> None:
    typer.echo(f"{printable(done['name'])} is {done['pseudonym']} from now on.")
    for title in ("gone", "stays"):
        for line in done[title]:
            typer.echo(with_dir(f"{title}: {printable(line)}", directory))
