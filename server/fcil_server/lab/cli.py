"""``scripts/reproduce``: run or resume an experiment, list it, or rewrite its report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fcil_adapters.images.named_sets import is_name
from fcil_protocol.errors import EXIT_RUN_FAILED, ConfigError
from fcil_protocol.formats import duration
from fcil_protocol.ids import digest_of
from fcil_protocol.process.terminal import errors, run_app
from fcil_server.lab import data, report
from fcil_server.lab.engine import Engine
from fcil_server.lab.experiment import load
from fcil_server.lab.plan import Cell
from fcil_server.lab.progress import Show, TimeBudget, describe_plan
from fcil_server.lab.results import PLAN

PROGRAM = "scripts/reproduce"

app = typer.Typer(
    name="reproduce",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def reproduce(
    experiment: Annotated[Path, typer.Argument(help="The TOML file of one table (experiments/).")],
    data_path: Annotated[
        Path | None,
        typer.Option("--data", help=f"The images, as fcil-client takes them; or {data.VARIABLE}."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results directory; results/NAME by default.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW[/PARTITION]", help="Only these cells; may be repeated."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N[,N]", help="Only these of the experiment's seeds.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Number of cells to run at the same time.")] = 1,
    list_only: Annotated[
        bool, typer.Option("--list", help="Check the TOML and list its cells; run nothing.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Rewrite the report; run nothing.")
    ] = False,
) -> None:
    """Run the cells of an experiment that have no result yet, then write its report.

    If interrupted, start it again: it resumes with the next cell.
    """
    with errors():
        numbers = _numbers(seeds)
        command = _command(experiment, data_path, results)
        found = load(experiment)
        engine = Engine.of(found, results, only=only or [], seeds=numbers, command=command)
        if list_only:
            _list(engine, jobs)
            return
        if report_only:
            _tell(engine.write_report())
            return
        failed = engine.run(data_path, jobs, Show())
        _tell(report.paths(engine.results.folder))
    if failed:
        raise SystemExit(EXIT_RUN_FAILED)


def _list(engine: Engine, jobs: int) -> None:
    """Print all cells, and which of them have a result as far as known here."""
    cells, kept = engine.chosen, engine.results
    done: set[str] = set()
    if (kept.folder / PLAN).exists():
        done = set(kept.finished(cells, kept.known()))
    different: dict[str, Cell] = {}  # joint rows share a result between partitions
    for cell in cells:
        first = different.setdefault(digest_of(cell.identity(cell.split.slug, "")), cell)
        state = "done" if cell.name in done else f"about {duration(cell.expected_s)}"
        if first is not cell:
            state = f"the same as {first.name}"
        print(f"{cell.name}  ({cell.method}, {state})")  # noqa: T201
    left = [c for c in different.values() if c.name not in done]
    print(describe_plan(len(left), len(different), TimeBudget(jobs).left(left), jobs))  # noqa: T201


def _tell(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)  # noqa: T201


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}; expected numbers such as 1,2,3.") from error


def _command(experiment: Path, data_path: Path | None, results: Path | None) -> str:
    """Return the command that makes the whole table again, without paths of this machine."""
    apart = ("not-run/",) if experiment.parent.name == "not-run" else ()
    words = [PROGRAM, "".join(("experiments/", *apart, experiment.name))]
    if data_path or os.environ.get(data.VARIABLE):
        images = data_path or Path(os.environ[data.VARIABLE])
        words += ["--data", str(images) if is_name(str(images)) else images.name]
    if results:
        words += ["--results", results.name]
    return shlex.join(words)


def main() -> None:
    """Run the program."""
    run_app(app, PROGRAM)
