"""``fcil-client doctor``: look at everything that a client needs, and say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_client.cli.target_options import ServerOption
from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit, errors, printable

if TYPE_CHECKING:
    from fcil_client.doctor.checks.line import Line


def doctor(
    data: Annotated[
        Path | None, typer.Option(help="The folder or zip file whose client is examined.")
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
        from fcil_client.doctor.checks.line import State, exit_code
        from fcil_client.doctor.examination import Examination, Wishes

        check_engine(engine)
        if str(ticket) == "-" and sys.stdin is None:
            raise UsageError("--ticket - reads standard input, which is closed.")
        wishes = Wishes(data, server, ticket, device, engine, weights)
        stdin = sys.stdin.buffer if sys.stdin else io.BytesIO()
        lines = Examination(wishes, stdin, _say).lines()
        code = exit_code(lines)
        count = {s.value: sum(line.state is s for line in lines) for s in State}
        rows = [line.fields() for line in lines]
        emit(
            {"lines": rows, "count": count},
            form,
            lambda: _show(lines, count),
            rows=rows,
            status="error" if code else "ok",
        )
    if code:
        raise typer.Exit(code)


def _say(text: str) -> None:
    typer.echo(printable(text), err=True)


_MARKS = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL", "skipped": "-   "}


def _show(lines: list[Line], count: dict[str, int]) -> None:
    """Print the lines, section by section, and below each what to do."""
    from itertools import groupby

    several = len({line.client for line in lines if line.client}) > 1
    heading = (
        (lambda line: (line.section, line.client)) if several else lambda line: (line.section, "")
    )
    for (section, client), group in groupby(lines, key=heading):
        name = f" of {printable(client)}" if client else ""
        typer.echo(f"\n{section}{name}")
        for _, alike in groupby(group, key=_together):
            first, *rest = alike
            what = ", ".join(line.id.partition(".")[2] for line in (first, *rest))
            typer.echo(f"  {_MARKS[first.state.value]}  {what}: {printable(first.text)}")
            if first.action:
                typer.echo(f"          {printable(first.action)}")
    typer.echo(
        f"\n{count['ok']} ok, {count_of(count['warning'], 'warning')}, "
        f"{count_of(count['failure'], 'failure')}, "
        f"{count['skipped']} skipped"
    )


def _together(line: Line) -> tuple[str, str]:
    """Return what lines have in common that are shown as one: skipped for the same reason."""
    return ("", line.text) if line.state.value == "skipped" else (line.id, line.text)
