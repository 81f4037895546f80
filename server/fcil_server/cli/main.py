"""``fcil-server``: serve a federation, look at it, and run the demo."""

from __future__ import annotations

import gc
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.process.cli_options import (
    FormatOption,
    JsonOption,
    VersionOption,
    grouped,
    verbs_in_panels,
)
from fcil_protocol.process.log_file import LogOptions
from fcil_protocol.process.terminal import Format, chosen, emit, run_app
from fcil_protocol.process.terminal import errors as terminal_errors
from fcil_server.cli import (
    classes as cli_classes,
)
from fcil_server.cli import (
    export as cli_export,
)
from fcil_server.cli import (
    forget,
    members,
    methods_command,
    relay,
    run_queue,
    storage,
)
from fcil_server.cli import (
    page as cli_page,
)
from fcil_server.cli import (
    rounds as cli_rounds,
)
from fcil_server.cli import (
    token as cli_token,
)
from fcil_server.cli.options import (
    DEFAULT_DIRECTORY,
    BudgetOption,
    DirOption,
    RunOption,
    SetOption,
    elsewhere,
    errors,
    with_budget,
    with_dir,
)
from fcil_server.cli.serve_options import (
    ApiOption,
    CertOption,
    KeyOption,
    MetricsOption,
    PageOption,
    PartitionOption,
    ReadOnlyOption,
    ServeCommand,
    api_settings,
    kept_settings,
    metrics_settings,
    page_settings,
)

if TYPE_CHECKING:
    from fcil_protocol.process.log_file import LogFile
    from fcil_server.daemon.context import ServerContext
    from fcil_server.daemon.journal import JournalNote
    from fcil_server.federation.first_start import Start

VERBS = {
    "Start": ("demo", "serve", "methods"),
    "Watch": ("status", "page", "rounds"),
    "Clients and tickets": ("enrol", "clients", "revoke", "forget", "erase", "relay", "token"),
    "Rounds, runs and classes": (
        "pause",
        "resume",
        "close-round",
        "drain",
        "stop",
        "run",
        "classes",
    ),
    "Models and results": ("report", "export"),
    "Data and maintenance": ("check", "backup", "restore", "move-ledger", "rotate-keys"),
}

app = typer.Typer(
    name="fcil-server",
    cls=verbs_in_panels(VERBS),
    help="Serve a federation for class-incremental learning.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

STATUS_S = 5.0  # for a server to say how it is


@app.callback()
def _root(version: VersionOption = False) -> None:
    """Answer ``--version``."""


@app.command(cls=ServeCommand)
@grouped
def serve(
    *,
    directory: DirOption = DEFAULT_DIRECTORY,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file to use in place of the directory's federation.toml."),
    ] = None,
    settings: SetOption = None,
    partition: PartitionOption = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    metrics: MetricsOption = None,
    metrics_cert: CertOption = None,
    metrics_key: KeyOption = None,
    page: PageOption = None,
    page_cert: CertOption = None,
    page_key: KeyOption = None,
    page_read_only: ReadOnlyOption = False,
    api: ApiOption = None,
    api_cert: CertOption = None,
    api_key: KeyOption = None,
    new_run: Annotated[bool, typer.Option(help="Begin a new run instead of resuming.")] = False,
    budget: BudgetOption = None,
    until_done: Annotated[
        bool,
        typer.Option(help="Exit when all listed tasks have been learned and no run waits."),
    ] = False,
    drain_on_term: Annotated[
        bool,
        typer.Option(
            "--drain-on-term", help="On SIGTERM, finish the current round before stopping."
        ),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="While another server works on DIR, wait, and take over at its end."
        ),
    ] = False,
    log: LogOptions,
) -> None:
    """Serve the federation in DIR until Ctrl-C; create it if it does not exist.

    When it starts again, it resumes the same round.
    """
    with errors(directory):
        import asyncio

        from fcil_server.federation.config import load
        from fcil_server.federation.directory import CONFIG, Federation, open_when_free
        from fcil_server.federation.environment import environment_settings, naming_variables
        from fcil_server.federation.first_start import load_first, removed_if_refused
        from fcil_server.federation.partition_plan import (
            check_fits,
            check_resumes,
            plan_settings,
            read_plan,
        )

        plan = None if partition is None else read_plan(partition)
        tasks = () if plan is None else plan_settings(plan)
        given = (*tasks, *environment_settings(), *with_budget(settings, budget))
        doors = page_settings(page, page_cert, page_key, read_only=page_read_only)
        metrics_given = metrics_settings(metrics, metrics_cert, metrics_key)
        api_given = api_settings(api, api_cert, api_key)
        kept = kept_settings(given, page=doors, metrics=metrics_given, api=api_given)
        overrides = (*given, *metrics_given, *doors, *api_given)
        if port is not None:
            own = directory / CONFIG
            read = load if own.exists() else load_first
            with naming_variables(overrides):
                found = read(config or (own if own.exists() else None), overrides)
            host = found.federation.listen.rpartition(":")[0]
            overrides = (*overrides, f'federation.listen="{host}:{port}"')
        file = log.open()

        def opened() -> Federation:
            opening = partial(Federation.open, directory, config, overrides, kept)
            if not standby:
                return opening()
            return open_when_free(opening, directory, partial(typer.echo, err=True))

        with (
            removed_if_refused(directory) as start,
            closing(opened()) as federation,
        ):
            start.opened = True
            if plan is not None:
                check_fits(plan, federation.config)
                if not new_run:
                    check_resumes(plan, federation.ledger)
            flags = {"new_run": new_run, "until_done": until_done}
            flags["drain_on_term"] = drain_on_term
            asyncio.run(_serve(federation, file, start, directory, **flags))


async def _serve(
    federation: Any, log: LogFile | None, start: Start, directory: Path, **flags: bool
) -> None:
    from fcil_protocol.process.log_file import DaemonOutput
    from fcil_protocol.process.supervisor import Service
    from fcil_server.daemon.journal import Journal
    from fcil_server.daemon.server import Server

    said, service = DaemonOutput(log), Service(log)

    def say(note: JournalNote) -> None:
        said(note.at, note.level, with_dir(note.text, directory), note.code)
        service.news()

    def listening(context: ServerContext) -> None:
        start.listens = True
        if log is None:
            cli_page.show_first_link(context)
        # Modules and schemas live as long as this process: no collection looks at them again,
        # which would keep the loop for 50 ms.
        gc.unfreeze()  # the server of the run before goes
        gc.collect()
        gc.freeze()

    journal = Journal(federation.ledger, say)
    while True:
        server = Server(federation, journal, service=service, listening=listening, **flags)
        await server.serve()
        if not server.goes_on:
            return
        federation.keep_port(server.port)
        flags |= {"new_run": False, "follows": True}


@app.command()
def status(
    directory: DirOption = DEFAULT_DIRECTORY,
    alive: Annotated[
        bool,
        typer.Option(
            "--alive",
            help="Fail with code 2 or 3 if no daemon answers, or it is a relay without a session.",
        ),
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show the federation's current state, whether or not its server runs."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.cli.show_status import check_alive, show_status

        data = _status(directory, alive=alive)
        if alive:
            check_alive(data)
        emit(data, form, lambda: show_status(data, directory))


def _status(directory: Path, *, alive: bool) -> dict[str, Any]:
    from fcil_protocol.errors import Starting, Unreachable
    from fcil_protocol.process import control_socket

    try:
        return control_socket.ask(directory, "status", STATUS_S)
    except (Unreachable, Starting) as error:
        if alive:
            raise  # of a relay's directory, too
        # Imported only now: they take longer than a running server's answer.
        from fcil_server.daemon.status import stopped_status
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.databases.opening import has_ledger, host_of_server
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

        find_directory(directory)
        # A command that opens a new federation has its lock for a moment before the ledger.
        if not has_ledger(directory):
            raise
        if isinstance(error, Starting):
            typer.echo(error.message, err=True)
        elif host := host_of_server(directory):
            raise elsewhere(host) from error
        with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
            return stopped_status(ledger, str(directory.resolve()))


@app.command()
def rounds(
    directory: DirOption = DEFAULT_DIRECTORY,
    run: RunOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write a CSV table.")] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List the rounds of a run: participants, duration and bytes."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.cli.show_rounds import rounds_csv, show_rounds
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.reports.results.run_data import round_rows

        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            row = ledger.runs.named(run)
            rows = round_rows(ledger, row.run_id)
        show = (lambda: rounds_csv(rows)) if as_csv else (lambda: show_rounds(rows))
        emit({"run": row.run_id, "rounds": rows}, form, show, rows=rows)


@app.command()
def report(
    directory: DirOption = DEFAULT_DIRECTORY,
    run: RunOption = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", help="Compare with this federation's newest run, or this run directory."
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Rewrite a run's directory (tables, plots, report.html) and show its results."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.aggregation.store import StateStore
        from fcil_server.cli.show_report import show_comparison, show_report
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.reports import comparison, run_directory

        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            row = ledger.runs.named(run)
            folder = directory / "runs" / row.run_id
            states = StateStore(folder / "states")
            shown = run_directory.write(ledger, row.run_id, folder, states=states)
            data = run_directory.summary(shown)["data"]
            if beside:
                runs = comparison.read([folder, *beside])
                data["compared"] = [str(p) for p in comparison.write(runs, folder)]
                emit(data, form, lambda: show_comparison(runs, folder))
                return
            emit(data, form, lambda: show_report(shown, folder))


@app.command()
def demo(
    clients: Annotated[int, typer.Option("-n", "--clients", min=1, max=64)] = 3,
    directory: Annotated[Path, typer.Option("--dir", help="The demo's directory.")] = Path(
        "fcil-demo"
    ),
    settings: SetOption = None,
    budget: BudgetOption = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Learn the digits 0 to 9 in five tasks with a real server and real clients, offline."""
    form = chosen(form, json_flag)
    with terminal_errors(form):
        from fcil_server.cli.show_report import show_demo
        from fcil_server.lab.local.demo import run_demo

        try:
            ended = run_demo(directory, clients, with_budget(settings, budget))
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command resumes where it was", err=True)
            raise
        show_demo(ended, form)


app.add_typer(methods_command.app)
app.add_typer(members.app)
app.add_typer(cli_page.app)
app.add_typer(forget.app)
app.add_typer(storage.app)
app.add_typer(cli_export.app)
app.add_typer(cli_rounds.runs, name="run")
for _verb in (run_queue.submit, run_queue.queue, run_queue.cancel):
    cli_rounds.runs.command()(_verb)
cli_rounds.runs.command("rollback")(storage.rollback)
app.add_typer(relay.app)
app.add_typer(cli_rounds.app)
app.add_typer(cli_classes.app, name="classes")
app.add_typer(cli_token.app, name="token")


def main() -> None:
    """Run the command line."""
    run_app(app)
