"""``scripts/reproduce``: run an experiment, go on with it, list it, or write its report anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.errors import EXIT_RUN_FAILED, ConfigError
from fcil_protocol.files import DirectoryLock
from fcil_protocol.terminal import errors, run_app
from fcil_server.lab import data, plan, report, runner
from fcil_server.lab.budget import Budget, plan_words
from fcil_server.lab.cell import Work
from fcil_server.lab.experiment import Experiment, load
from fcil_server.lab.plan import Cell, digest_of
from fcil_server.lab.results import PLAN, Known, Results
from fcil_server.lab.show import Show
from fcil_server.report_page import duration

RESULTS = Path("results")  # in the current directory; a folder of the experiment's name in it
PROGRAM = "scripts/reproduce"

app = typer.Typer(
    name="reproduce",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def reproduce(
    experiment: Annotated[Path, typer.Argument(help="The TOML of one table (experiments/).")],
    data_path: Annotated[
        Path | None,
        typer.Option("--data", help=f"Folder or zip of the images; or {data.VARIABLE}."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Where results lie; results/NAME by default.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW[/PARTITION]", help="These cells alone; may be repeated."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N[,N]", help="These of the experiment's seeds alone.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Cells at the same time.")] = 1,
    list_only: Annotated[
        bool, typer.Option("--list", help="Check the TOML and list its cells; run nothing.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Write the report anew; run nothing.")
    ] = False,
) -> None:
    """Run the cells of an experiment that have no result yet, then write its report.

    Interrupted at any moment and started again, it goes on with the next cell.
    """
    with errors():
        found = load(experiment)
        cells = plan.make(found)
        chosen = plan.choose(cells, only or [], _numbers(seeds))
        folder = results or RESULTS / found.name
        command = _command(experiment, data_path, results, only or [], seeds)
        if list_only:
            _list(chosen, folder, jobs)
            return
        kept = Results(folder)
        if report_only:
            done = kept.finished(cells, kept.known())
            _tell(report.write(kept.folder, found, cells, done, {}, command))
            return
        kept.make()
        with DirectoryLock.acquire(kept.folder, "experiment"):
            failed = _run(found, cells, chosen, kept, data_path, jobs, command)
    if failed:
        raise SystemExit(EXIT_RUN_FAILED)


def _run(
    experiment: Experiment,
    cells: Sequence[Cell],
    chosen: Sequence[Cell],
    results: Results,
    data_path: Path | None,
    jobs: int,
    command: str,
) -> dict[str, str]:
    """Run what has no result yet; return the failed cells."""
    show = Show()
    weights = data.weights_of(experiment.setting)
    images = data.find(experiment, data_path, results.data)
    show.say(f"partitions: {len({c.split.slug for c in chosen})} of {images.source}")
    parts = data.partitions(images, chosen, results.data)
    known = results.see(data.backbone_digest(experiment.setting, weights), parts)

    def work(cell: Cell, key: str) -> Work:
        one = parts[cell.split.slug]
        return Work(
            data=images.source,
            partition=one.path,
            tasks=one.tasks,
            test=images.test,
            weights=weights,
            room=results.room(key),
            limit_s=experiment.budget.limit_s,
        )

    pending = runner.todo(chosen, known, results, work)
    for item in pending:  # every server's whole configuration, before any of them starts
        plan.server_config(item.cell, item.work.tasks, weights=weights, central_test="")
    budget = _budget(chosen, known, results, jobs)
    todo = [t.cell for t in pending]
    show.say(plan_words(len(pending), _different(chosen, known), budget.left(todo), jobs))
    failed: dict[str, str] = {}

    def write() -> list[Path]:
        done = results.finished(cells, known)
        return report.write(results.folder, experiment, cells, done, failed, command)

    try:
        failed |= runner.run(pending, known, results, budget, show, after=write)
    except KeyboardInterrupt:
        show.close()
        show.say("interrupted; the same command goes on")
        raise
    finally:
        show.close()
        paths = write()
    if failed:
        show.say(f"{len(failed)} of {len(pending)} cells failed: {', '.join(failed)}")
    _tell(paths)
    return failed


def _different(cells: Sequence[Cell], known: Known) -> int:
    """Count results, not cells: joint rows share theirs between partitions."""
    return len({known.key(c) for c in cells})


def _budget(cells: Sequence[Cell], known: Known, results: Results, jobs: int) -> Budget:
    """Return what cells take, learned from those that are finished."""
    budget = Budget(jobs)
    done = results.finished(cells, known)
    for cell in cells:
        if cell.name in done:
            budget.measured(cell, done[cell.name]["seconds"]["wall_s"])
    return budget


def _list(cells: Sequence[Cell], folder: Path, jobs: int) -> None:
    """Print all cells, and which of them have a result as far as that is known here."""
    done: set[str] = set()
    if folder.is_dir():
        kept = Results(folder)
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
    print(plan_words(len(left), len(different), Budget(jobs).left(left), jobs))  # noqa: T201


def _tell(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)  # noqa: T201


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}; expected numbers such as 1,2,3.") from error


def _command(
    experiment: Path, data_path: Path | None, results: Path | None, only: Sequence[str], seeds: str
) -> str:
    """Return the command that goes on with this experiment; no path of this machine in it."""
    words = [PROGRAM, f"experiments/{experiment.name}"]
    if data_path or os.environ.get(data.VARIABLE):
        words += ["--data", (data_path or Path(os.environ[data.VARIABLE])).name]
    if results:
        words += ["--results", results.name]
    words += [w for text in only for w in ("--only", f"'{text}'")]
    return " ".join(words + (["--seeds", seeds] if seeds else []))


def main() -> None:
    """Run the program."""
    run_app(app)
