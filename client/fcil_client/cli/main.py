"""``fcil-client``: join a federation with a folder of images, and look at the daemon."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_client.cli import member
from fcil_client.cli import model as cli_model
from fcil_client.cli import split as cli_split
from fcil_client.cli.backbone import app as backbone_app
from fcil_client.cli.data import data as cli_data
from fcil_client.cli.doctor import doctor
from fcil_client.cli.peers import peers
from fcil_client.cli.swarm import swarm
from fcil_client.cli.target_options import OwnSlotOption, PartitionOption, ServerOption, seat_of
from fcil_client.cli.work_options import WorkOptions
from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import (
    FormatOption,
    JsonOption,
    VersionOption,
    grouped,
    verbs_in_panels,
)
from fcil_protocol.process.log_file import LogOptions
from fcil_protocol.process.terminal import Format, chosen, emit, errors, run_app, say

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fcil_client.notes import Note
    from fcil_client.rounds.options import ClientOptions
    from fcil_client.state.home import Enrolment, Home

VERBS = {
    "Take part": ("join", "swarm", "leave"),
    "Watch": ("status", "journal", "privacy", "peers", "doctor"),
    "Use the model": ("predict", "export"),
    "Data and maintenance": ("data", "split", "backbone", "rotate-keys"),
}

app = typer.Typer(
    name="fcil-client",
    cls=verbs_in_panels(VERBS),
    help="Take part in federated class-incremental learning with a folder of images.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(version: VersionOption = False) -> None:
    """Keep the verbs as sub-commands, and answer ``--version``."""


@app.command()
@grouped
def join(
    *,
    data: Annotated[
        Path,
        typer.Option(
            help="FOLDER/<class>/<image>, FOLDER/train/<class>/..., a zip of either, "
            "or another form of docs/data.md."
        ),
    ],
    ticket: Annotated[
        Path | None,
        typer.Option(help="The ticket's file, or - to read it from standard input."),
    ] = None,
    server: ServerOption = None,
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait",
            help="If no server can be reached at the first start, fail with code 2.",
        ),
    ] = False,
    partition: PartitionOption = None,
    slot: OwnSlotOption = -1,
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            help="Offer a folder of images without classes, too: methods with pseudo-labels count "
            "them under the classes that the model gives them, right or wrong."
        ),
    ] = None,
    work: WorkOptions,
    otlp: Annotated[
        str,
        typer.Option(
            help="Send spans of each round to this collector of OpenTelemetry, such as "
            "http://127.0.0.1:4318.",
            metavar="URL",
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what would leave this device, and send none of it.",
            rich_help_panel="Dry run",
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="Dry run with this installed method; contacts no server.",
            rich_help_panel="Dry run",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            metavar="KEY=VALUE",
            help="Dry run: method.OPTION or run.backbone.",
            rich_help_panel="Dry run",
        ),
    ] = None,
    log: LogOptions,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Join the federation and train whenever the server asks, until Ctrl-C.

    Images, their names and everything else stay in the folder; what leaves is what the
    method's schema names, and --dry-run shows it. Started again, the client resumes.
    """
    form = chosen(form, json_flag)
    if dry_run:
        with errors(form):
            if ticket is not None:
                typer.echo("A dry run does not enrol: the ticket stays unused.", err=True)
            options = replace(work.options(data, partition, slot), unlabelled=unlabelled)
            _dry_run(options, server, method, overrides or [], form)
        return
    with errors():
        if method is not None or overrides or form is not Format.TEXT:
            raise UsageError("--method, -c and --format are for --dry-run.")
        import asyncio
        import time

        from fcil_client.data.unlabelled import check_folder
        from fcil_client.membership.rotate_keys import finish_first
        from fcil_client.membership.wait_for_server import wait_for_server
        from fcil_client.state.home import find_data
        from fcil_protocol.process.log_file import DaemonOutput
        from fcil_protocol.process.supervisor import Service
        from fcil_protocol.storage.atomic_files import DirectoryLock

        if otlp:
            from fcil_client.daemon.tracing import check_collector

            check_collector(otlp)
        options = work.options(data, partition, slot)
        folder = find_data(str(data))
        options = replace(options, data=folder, otlp=otlp)
        if unlabelled is not None:
            folder_of_it = check_folder(unlabelled, folder, divided=partition is not None)
            options = replace(options, unlabelled=folder_of_it)
        file = log.open()
        seat = seat_of(partition, slot)
        said, service = DaemonOutput(file), Service(file)
        enrol = partial(finish_first, folder, seat, _enrolling(ticket, folder, server, seat, slot))

        def wait(text: str) -> None:
            said(time.time(), "warning", text)

        enrolled = asyncio.run(enrol() if no_wait else wait_for_server(enrol, service, wait))
        if enrolled is None:  # a signal ended the wait
            return
        home, enrolment = enrolled

        async def run() -> None:
            from fcil_client.daemon.client import Client

            def show(note: Note) -> None:
                said(note.at, note.level, note.text)
                service.news()

            await Client(home, enrolment, options, notify=show, service=service).run()

        with DirectoryLock.acquire(home.directory, "client"):
            asyncio.run(run())


def _dry_run(
    options: ClientOptions,
    server: str | None,
    method: str | None,
    overrides: list[str],
    form: Format,
) -> None:
    from fcil_client.cli.show_sent import show_dry_run
    from fcil_client.data.unlabelled import check_folder
    from fcil_client.membership.ask_terms import look
    from fcil_client.membership.dry_run import count_images
    from fcil_client.membership.dry_run import dry_run as predict
    from fcil_client.state.home import find_data

    folder, divided = find_data(str(options.data)), options.partition is not None
    seat = seat_of(options.partition, options.slot)
    preview, home = look(folder, server, method, overrides, seat=seat)
    inventory = count_images(folder, home, options.partition, options.slot)
    offered = options.unlabelled
    if offered is not None:
        offered = check_folder(offered, folder, divided=divided)
    row = predict(
        folder,
        preview,
        inventory,
        enrolled=home is not None or divided,
        limits=options.limits,
        unlabelled=offered,
        training_metrics=options.training_metrics,
        link_only=options.link_only,
    )
    emit(row, form, lambda: show_dry_run(row))


def _enrolling(
    ticket: Path | None, folder: Path, server: str | None, seat: str, slot: int
) -> Callable[[], Coroutine[Any, Any, tuple[Home, Enrolment]]]:
    """Return what enrols a folder's client, or finds its enrolment; it may be repeated."""
    import asyncio
    import io
    import sys

    from fcil_client.membership.enrol import find
    from fcil_client.membership.enrol_with_ticket import redeem
    from fcil_client.state.home import Home
    from fcil_protocol.storage.atomic_files import DirectoryLock
    from fcil_protocol.trust.ticket import read_ticket

    if ticket is None:
        name = f"{folder.resolve().name}-{slot:03d}" if seat else ""
        return lambda: asyncio.to_thread(find, folder, server, seat=seat, name=name)
    if str(ticket) == "-" and sys.stdin is None:
        raise UsageError("--ticket - reads standard input, which is closed.")
    shown = read_ticket(ticket, sys.stdin.buffer if sys.stdin else io.BytesIO())

    told: set[str] = set()

    def say_once(text: str) -> None:
        if text not in told:  # the attempt may be repeated for days
            told.add(text)
            say(text)

    async def enrol() -> tuple[Home, Enrolment]:
        with DirectoryLock.acquire(Home.of(shown.federation, folder, seat).directory, "client"):
            return await redeem(shown, folder, say_once, seat=seat)

    return enrol


@app.command()
def status(
    data: Annotated[Path | None, typer.Option(help="Only the client of this folder.")] = None,
    members: Annotated[
        bool, typer.Option("--members", help="List the members of swarms as well.")
    ] = False,
    alive: Annotated[
        bool, typer.Option("--alive", help="Fail with code 2 or 3 if no daemon answers.")
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show what this user's clients on this machine are doing; a swarm counts as one."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_client.cli.show_status import all_status, check_alive, one_status, show_all
        from fcil_client.state.home import Home

        swarms, rows = all_status(members=members) if data is None else ([], [])
        if data is not None:
            rows = [one_status(home) for home in Home.known(data, None)]
        if alive:
            check_alive([*swarms, *rows])
        told = {"clients": rows, "swarms": swarms}
        emit(told, form, lambda: show_all(swarms, rows), rows=[*swarms, *rows])


@app.command()
def journal(
    data: Annotated[Path | None, typer.Option(help="Only the client of this folder.")] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Only entries sent or answered since this time (UTC).")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show all that has left this device: each sealed envelope, its contents and its answer."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_client.cli.show_sent import show_journal
        from fcil_client.cli.show_status import one_journal
        from fcil_client.state.home import Home

        journals = [one_journal(home, since) for home in Home.with_journal(data)]
        rows = [{"client": j["client"], **row} for j in journals for row in j["envelopes"]]
        emit({"journals": journals}, form, lambda: show_journal(journals), rows=rows)


@app.command()
def privacy(
    data: Annotated[Path | None, typer.Option(help="Only the client of this folder.")] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show how much of the privacy budget the noised statistics have spent."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_client.cli.show_privacy import one_privacy, show_privacy
        from fcil_client.cli.show_status import one_status
        from fcil_client.state.home import Home

        homes = Home.known(data, None) if data is not None else Home.all()
        rows = [one_privacy(home, one_status(home)) for home in homes]
        emit({"clients": rows}, form, lambda: show_privacy(rows), rows=rows)


app.command()(member.leave)
app.command("rotate-keys")(member.rotate_keys)
app.command()(peers)
app.command()(doctor)
app.command()(cli_data)
app.command()(swarm)
app.add_typer(backbone_app, name="backbone")


app.command()(cli_split.split)
app.command()(cli_model.predict)
app.command()(cli_model.export)


def main() -> None:
    """Run the command line."""
    run_app(app)
