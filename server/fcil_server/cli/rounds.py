"""``fcil-server close-round``, ``pause``, ``resume``, ``drain``, ``stop``, and those of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption, verbs_in_panels
from fcil_protocol.process.terminal import Format, chosen, count_of, emit
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, ask, errors, with_dir

app = typer.Typer()

PROMOTE_S = 600.0  # the server's worker may be busy with a round's updates
STOP_S = 120.0  # for a server to write what it has


@app.command("close-round")
def close_round(
    directory: DirOption = DEFAULT_DIRECTORY,
    rest_of_task: Annotated[
        bool,
        typer.Option("--rest-of-task", help="Also skip the remaining rounds of its task."),
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Close the current round with the updates received so far; with none, skip it."""
    _order("close_round", directory, form, json_flag, rest_of_task=rest_of_task)


@app.command()
def pause(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Open no further round until `resume`; the current one completes."""
    _order("pause", directory, form, json_flag)


@app.command()
def resume(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Resume rounds after `pause`, or cancel a `drain` that has not finished."""
    _order("resume", directory, form, json_flag)


@app.command()
def drain(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Stop the server when the current round is complete, and open no other.

    A round that misses its quorum at the deadline resumes when the server starts again.
    """
    _order("drain", directory, form, json_flag)


@app.command()
def stop(
    directory: DirOption = DEFAULT_DIRECTORY,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return immediately, before the server has ended.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Fail with code 3 if it has not ended after this many seconds; it still ends.",
            show_default=f"{STOP_S:.0f}",
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Stop the server of the federation in DIR and wait for its end; the open round is kept."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_protocol.storage.lock_holder import holding_pid, wait_until_over

        def say(text: str) -> None:
            typer.echo(f"The server stops: {text}", err=True)

        if no_wait and timeout is not None:
            raise UsageError("--timeout is for a wait, and --no-wait does not.", action="Give one.")
        pid = holding_pid(directory)
        told = ask(directory, "stop")
        if no_wait:
            say("it finishes its writes first.")
        else:
            wait_until_over(directory, pid, STOP_S if timeout is None else timeout, say)
            typer.echo("The server has stopped.", err=True)
        emit(told, form, lambda: None)


def _order(
    op: str,
    directory: Path,
    form: Format,
    json_flag: bool,
    **fields: Any,
) -> None:
    """Send a command to the running server, and show its answer."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.operator_text import describe_done

        told = ask(directory, op, **fields)
        emit(told, form, lambda: None)
        typer.echo(with_dir(describe_done(op, told), directory), err=True)


runs = typer.Typer(cls=verbs_in_panels({}), help="List, queue and end runs.", no_args_is_help=True)


@runs.command("ls")
def run_ls(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List the runs of the federation, oldest first."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.reports.results.run_data import run_rows

        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            rows = run_rows(ledger)

        def show() -> None:
            from fcil_server.cli.show_status import forked_from

            for r in rows:
                typer.echo(
                    f"{r['id']}  {r['status']:8}  {r['method']}, {count_of(r['tasks'], 'task')}, "
                    f"{count_of(r['rounds'], 'round')}{forked_from(r)}"
                    f"{', ' + r['title'] if r['title'] else ''}"
                    f"{'' if r['emptied_at'] is None else ', emptied: a client was forgotten'}"
                )

        emit({"runs": rows}, form, show, rows=rows)


@runs.command("stop")
def run_stop(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """End the newest run for good; the next one of the queue begins, or a new one at `serve`."""
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import Unreachable, UsageError
        from fcil_protocol.process import control_socket
        from fcil_server.federation.directory import find_directory, operator, stopped_ledger
        from fcil_server.ledger.enums import RunStatus

        find_directory(directory)
        running = True
        try:
            told = control_socket.ask(directory, "stop_run")
        except Unreachable:
            running = False
            with stopped_ledger(directory) as ledger:
                run = ledger.runs.named(None)
                if run.status is RunStatus.DONE:
                    raise UsageError(
                        f"run {run.run_id} is complete already.",
                        action="Nothing: the next one of the queue begins with fcil-server serve.",
                    ) from None
                ledger.audit.add(operator(), "stop_run", run.run_id)
                ledger.runs.set_status(run.run_id, RunStatus.STOPPED)
                told = {"run": run.run_id, "next": False}
        emit(told, form, lambda: None)
        more = ""
        if told.get("next"):
            more = " The next one begins."
        elif running:
            more = " No other run waits, so the server ends."
        typer.echo(f"The run is stopped.{more}", err=True)


@runs.command("promote")
def run_promote(
    state: Annotated[
        str,
        typer.Argument(
            help="The state whose model clients use: best, a number, or last: the newest, always."
        ),
    ],
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Let the clients of the newest run use the model of one state while rounds continue.

    Their predict and export follow it at once, or when they connect. With `last` they use the
    newest model again.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import Unreachable
        from fcil_protocol.process import control_socket
        from fcil_server.federation.directory import find_directory, operator, stopped_ledger
        from fcil_server.runs.promotion import describe_promoted, promote_offline

        find_directory(directory)
        try:
            told = control_socket.ask(directory, "promote", PROMOTE_S, state=state)
        except Unreachable:
            with stopped_ledger(directory) as ledger:
                told = promote_offline(ledger, directory, state, operator())
        emit(told, form, lambda: None)
        typer.echo(with_dir(describe_promoted(told), directory), err=True)
