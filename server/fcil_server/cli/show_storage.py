"""Text output of ``check`` and ``restore``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from fcil_protocol.process.terminal import count_of, printable
from fcil_server.cli.options import DEFAULT_DIRECTORY, with_dir
from fcil_server.storage.findings import CheckFinding, Severity
from fcil_server.storage.restore import Restored

_SIGNS = {Severity.OK: "ok     ", Severity.WARNING: "warning", Severity.FAILURE: "FAILURE"}


def show_findings(found: Sequence[CheckFinding], directory: Path = DEFAULT_DIRECTORY) -> None:
    """Print a check's findings, one per line, with the remedy below each fault."""
    for finding in found:
        about, text = printable(finding.about), printable(finding.text)
        typer.echo(f"{_SIGNS[finding.level]}  {about}: {text}")
        if finding.action:
            typer.echo(f"         -> {with_dir(printable(finding.action), directory)}")
    bad = sum(f.level is Severity.FAILURE for f in found)
    odd = sum(f.level is Severity.WARNING for f in found)
    typer.echo(
        f"{count_of(bad, 'failure')}, {count_of(odd, 'warning')}, "
        f"{count_of(len(found) - bad - odd, 'check')} passed"
    )


def show_restored(done: Restored, directory: Path, *, fresh: bool) -> None:
    """Print what was restored, and notes for the operator."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(done.manifest.created_at))
    typer.echo(f"{directory} is the federation {done.manifest.federation} as of {when}")
    if done.fork is not None:
        fork = done.fork
        typer.echo(
            f"  run {fork.run_id} continues from state {fork.parent_state} of {fork.parent_run}; "
            "anything later is learned again"
        )
    elif done.begun is not None:
        typer.echo(f"  the run had no state yet; it begins again as run {done.begun.run_id}")
    else:
        typer.echo(f"  {done.refused or 'no run was under way'}")
    if fresh:
        text = "  its keys are new; enrol every client again (fcil-server enrol NAME)"
        typer.echo(with_dir(text, directory))
    else:
        names = ", ".join(printable(name) for name in done.members) or "none"
        typer.echo(f"  members: {names}")
        text = (
            "  clients revoked after that are members again: revoke them before you serve "
            "(fcil-server revoke NAME)"
        )
        typer.echo(with_dir(text, directory))
        if not done.recertified:
            typer.echo(
                "  no root key here, so the certificate is the backup's; if the keys were rotated "
                "since, clients refuse them until they are certified again"
            )
    if done.withdrawn:
        typer.echo(f"  {done.withdrawn} open tickets were withdrawn; make new ones")
    typer.echo(with_dir("Start it with: fcil-server serve", directory))
