"""``fcil-server check``, ``backup``, ``restore``, ``run rollback``...: the server's files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit
from fcil_protocol.process.terminal import errors as terminal_errors
from fcil_server.cli.completion import complete_run
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, errors, with_dir

app = typer.Typer()


@app.command()
def check(
    directory: DirOption = DEFAULT_DIRECTORY,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Verify that keys, ledger, states and stored updates are intact; changes nothing.

    Works while the server runs. Exits with code 1 if something is lost or stops the server.
    """
    form = chosen(form, json_flag)
    failed = False
    with errors(directory, form):
        from fcil_server.cli.show_storage import show_findings
        from fcil_server.storage.check import check as look
        from fcil_server.storage.findings import Severity

        found = look(directory)
        count = {level.value: sum(f.level is level for f in found) for level in Severity}
        failed = bool(count[Severity.FAILURE.value])
        rows = [asdict(f) for f in found]
        status = "error" if failed else "ok"
        emit(
            {"findings": rows, "count": count},
            form,
            lambda: show_findings(found, directory),
            rows=rows,
            status=status,
        )
    if failed:
        raise typer.Exit(1)


@app.command("move-ledger")
def move_ledger_command(
    to: Annotated[
        str,
        typer.Argument(
            metavar="URL|file",
            help="postgresql://USER@HOST/DATABASE, or `file`: back into the directory.",
        ),
    ],
    directory: DirOption = DEFAULT_DIRECTORY,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Drop a ledger that is there, unless a server works on it."),
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Move a stopped server's ledger to Postgres, or back into its file.

    For servers on several hosts that share DIR; one host needs none of it.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import operator
        from fcil_server.storage.move_ledger import move_ledger

        place = move_ledger(directory, to, operator(), replace=replace)
        emit({"place": place}, form, lambda: typer.echo(f"The ledger is now at {place}."))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The backup file to write; must not exist.")],
    directory: DirOption = DEFAULT_DIRECTORY,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Leave out the server's private keys.")
    ] = False,
    passphrase_file: Annotated[
        Path | None,
        typer.Option(help="Its first line is the passphrase for the keys; default: ask."),
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Back up everything that the federation needs into one file.

    Works while the server runs. Private keys are encrypted with a passphrase or left out.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_protocol.errors import UsageError
        from fcil_protocol.formats import format_bytes
        from fcil_server.federation.directory import find_directory, operator
        from fcil_server.storage.backup import audit_backup
        from fcil_server.storage.backup import backup as write

        if without_keys and passphrase_file is not None:
            raise UsageError("--without-keys and --passphrase-file exclude each other.")
        find_directory(directory)
        phrase = None if without_keys else _passphrase(passphrase_file, confirm=True)
        done = write(directory, file, passphrase=phrase)
        audited = audit_backup(directory, done, operator())
        if not audited:
            why = "the ledger is in use, or of an older version"
            typer.echo(f"warning: the audit log was not written: {why}.", err=True)
        held = done.manifest
        data = {
            "file": str(done.file),
            "bytes": done.size_bytes,
            "federation": held.federation,
            "run": held.run,
            "state": held.state,
            "keys": held.keys,
            "files": len(held.files),
        }

        def show() -> None:
            at = "without a state yet" if held.state is None else f"at state {held.state}"
            what = f"run {held.run} {at}" if held.run else "no run yet"
            keys = "keys sealed with the passphrase" if held.keys else "without keys"
            typer.echo(f"{done.file}  {format_bytes(done.size_bytes)}: {what}, {keys}")

        emit(data, form, show)


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A backup.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="A new or empty directory for the federation.")
    ],
    passphrase_file: Annotated[
        Path | None,
        typer.Option(help="Its first line is the passphrase for the keys; default: ask."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder with your own copy of server.json and root.json.")
    ] = None,
    new_keys: Annotated[
        bool,
        typer.Option("--new-keys", help="Continue with new keys: every client must enrol again."),
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Create a federation directory from a backup, completely or not at all.

    Forks the active run, since clients may have seen more of it than the backup holds.
    They continue with the fork on their own.
    """
    form = chosen(form, json_flag)
    with terminal_errors(form):
        from fcil_server.cli.show_storage import show_restored
        from fcil_server.federation.directory import operator
        from fcil_server.storage.archive import verify
        from fcil_server.storage.restore import Keys
        from fcil_server.storage.restore import restore as write

        phrase = None
        if keys is None and not new_keys and verify(file).keys:
            phrase = _passphrase(passphrase_file, confirm=False)
        given = Keys(passphrase=phrase, folder=keys, fresh=new_keys)
        done = write(file, directory, given, actor=operator())
        continues = done.fork or done.begun
        data = {
            "directory": str(directory),
            "federation": done.manifest.federation,
            "created_at": done.manifest.created_at,
            "run": continues.run_id if continues else None,
            "parent": done.fork and {"run": done.fork.parent_run, "state": done.fork.parent_state},
            "members": done.members,
            "withdrawn_tickets": done.withdrawn,
        }
        emit(data, form, lambda: show_restored(done, directory, fresh=new_keys))


def rollback(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run's id, or the first characters of it.",
            show_default="newest",
            autocompletion=complete_run,
        ),
    ] = None,
    directory: DirOption = DEFAULT_DIRECTORY,
    to_task: Annotated[
        int | None, typer.Option(min=0, help="Go back to the end of this task.")
    ] = None,
    to_state: Annotated[int | None, typer.Option(min=0, help="Go back to this state.")] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Go back, as a new run that begins with an earlier state; the old run is kept.

    The server must be stopped; when it starts again, it and its clients continue the new run.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_server.federation.directory import find_directory, operator, stopped_ledger
        from fcil_server.runs.fork import choose_state, fork
        from fcil_server.runs.run_record import check_installed

        find_directory(directory)
        with stopped_ledger(directory) as ledger:
            row = ledger.runs.named(run)
            check_installed(row)
            source = row.run_id
            state = choose_state(ledger, directory, source, task=to_task, state=to_state)
            actor = operator()
            row = fork(ledger, directory, source, state, actor=actor, action="rollback")
            rounds = row.inherited
        data = {
            "run": row.run_id,
            "parent": {"run": source, "state": state},
            "rounds": rounds,
        }

        def show() -> None:
            text = (
                f"run {row.run_id} begins with state {state} of {source}, "
                f"{count_of(rounds, 'round')}; the next `fcil-server serve` continues it."
            )
            typer.echo(with_dir(text, directory))

        emit(data, form, show)


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    """Read the passphrase from a file, or ask for it on a terminal.

    Raises:
        UsageError: neither is possible.
    """
    import sys

    from fcil_protocol.errors import UsageError
    from fcil_protocol.trust.passphrase import read_passphrase

    if file is not None:
        return read_passphrase(file)
    if not sys.stdin.isatty():
        raise UsageError(
            ("a backup seals the server's keys" if confirm else "the backup's keys are sealed")
            + " with a passphrase, and there is no terminal to ask for it.",
            action="Give --passphrase-file FILE"
            + (", or --without-keys." if confirm else ", or --keys FOLDER, or --new-keys."),
        )
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True))
