"""``fcil-client doctor``: look at everything that a client needs, and say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_client.cli.target_options import ServerOption
from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit, errors, printable, say

if TYPE_CHECKING:
    from fcil_client.doctor.checks.findings import Finding


def doctor(
    data: Annotated[
        Path | None, typer.Option(help="The images whose client is examined, as for join.")
    ] = None,
    server: ServerOption = None,
    ticket: Annotated[
        Path | None,
        typer.Option(help="Examine this ticket, or - for standard input, without using it up."),
    ] = None,
    device: Annotated[str, typer.Option(help="As you would pass it to join.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="As you would pass it to join: auto, torch or onnx.")
    ] = "auto",
    weights: Annotated[
        Path | None, typer.Option(help="Local file with the backbone's weights, as for join.")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Look at this machine, a folder, its client and the way to its server, and change nothing.

    Every line is ok, a warning or a failure, with what to do next. Ends with 0 if nothing failed,
    else with the exit code of the first failure (docs/doctor.md).
    """
    form = chosen(form, json_flag)
    code = 0
    with errors(form):
        import io
        import sys

        from fcil_adapters.backbones.engines import check_engine
        from fcil_client.doctor.checks.findings import Level, exit_code
        from fcil_client.doctor.examination import Examination, Wishes

        check_engine(engine)
        if str(ticket) == "-" and sys.stdin is None:
            raise UsageError("--ticket - reads standard input, which is closed.")
        wishes = Wishes(data, server, ticket, device, engine, weights)
        stdin = sys.stdin.buffer if sys.stdin else io.BytesIO()
        found = Examination(wishes, stdin, say).findings()
        code = exit_code(found)
        count = {level.value: sum(f.level is level for f in found) for level in Level}
        rows = [finding.fields() for finding in found]
        emit(
            {"lines": rows, "count": count},
            form,
            lambda: _show(found, count),
            rows=rows,
            status="error" if code else "ok",
        )
    if code:
        raise typer.Exit(code)


_MARKS = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL", "skipped": "-   "}


def _show(found: list[Finding], count: dict[str, int]) -> None:
    """Print findings, section by section, and below each what to do."""
    from itertools import groupby

    several = len({f.client for f in found if f.client}) > 1
    for (section, client), group in groupby(found, lambda f: (f.section, f.client * several)):
        typer.echo(f"\n{section}{f' of {printable(client)}' if client else ''}")
        for _, alike in groupby(group, key=_together):
            first, *rest = alike
            what = ", ".join(f.id.partition(".")[2] for f in (first, *rest))
            typer.echo(f"  {_MARKS[first.level.value]}  {what}: {printable(first.text)}")
            if first.remedy:
                typer.echo(f"          {printable(first.remedy)}")
    typer.echo(
        f"\n{count['ok']} ok, {count_of(count['warning'], 'warning')}, "
        f"{count_of(count['failure'], 'failure')}, "
        f"{count['skipped']} skipped"
    )


def _together(finding: Finding) -> tuple[str, str]:
    """Return what findings have in common that are shown as one: skipped for the same reason."""
    return ("" if finding.level.value == "skipped" else finding.id, finding.text)
