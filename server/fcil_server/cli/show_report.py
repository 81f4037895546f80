"""Results of a run as tables for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fcil_protocol.formats import NOTHING, duration, format_bytes, percent, points
from fcil_protocol.process.tables import Column, console, least_width, show, show_table, table
from fcil_protocol.process.terminal import Format, count_of, emit
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import comparison, run_directory
from fcil_server.reports.results.metrics import Metrics
from fcil_server.reports.results.round_views import Bytes, sum_bytes
from fcil_server.reports.results.run_data import COMPARISON_HEAD, RunData, collect

if TYPE_CHECKING:
    from fcil_server.lab.local.demo import Demo


_OPEN_ROUNDS = 40  # more are summed by task and kind
_WIDE_TASKS = 8  # with more tasks the matrix has whole percents and no lines
_CELL = len("100 ")  # of a matrix in whole percents, and of its task's number
_SIDES = len("task 100 100.0 ")


def summary_tables(data: RunData, out: Console) -> list[Table]:
    """Return what `fcil-server report` and the demo print: matrix, headline numbers, bytes.

    The matrix is folded to the width of ``out``: further columns are a table below.
    """
    return [*matrix_tables(data.metrics, out), _headline_table(data), _bytes_table(data)]


def matrix_tables(m: Metrics | None, out: Console) -> list[Table]:
    """Return the accuracy matrix as tables that fit ``out``; none without an evaluation."""
    if m is None:
        return []
    rows = [
        (f"task {t}", *(_number(v) for v in row), *[""] * (m.tasks - 1 - t), mean)
        for t, (row, mean) in enumerate(zip(m.matrix, map(_number, m.task_mean), strict=True))
    ]
    columns = [
        _AFTER,
        *(Column(f"task {i}", i + 1, right=True) for i in range(m.tasks)),
        Column("mean", -1, right=True, style="bold"),
    ]
    full = table(rows, columns, **_MATRIX, box=box.HEAVY_HEAD)
    if m.tasks <= _WIDE_TASKS and least_width(out, full) <= out.width:
        return [full]
    (whole,) = _folded_matrix(m, m.tasks)
    if least_width(out, whole) <= out.width:
        return [whole]
    return _folded_matrix(m, max((out.width - _SIDES) // _CELL, 1))


def _folded_matrix(m: Metrics, columns: int) -> list[Table]:
    """Return the matrix in whole percents, with this number of tasks in each table."""
    tables = []
    for start in range(0, m.tasks, columns):
        tasks = range(start, min(start + columns, m.tasks))
        rows = [
            (
                f"task {t}",
                *(_number(m.matrix[t][i], 0) if i <= t else "" for i in tasks),
                _number(m.task_mean[t]),
            )
            for t in range(start, m.tasks)
        ]
        shown = [_AFTER, *(Column(str(i), 1 + i - start, right=True) for i in tasks)]
        if start == 0:
            shown.append(Column("mean", -1, right=True, style="bold"))
        title = _MATRIX if start == 0 else _MATRIX | {"title": "Further tasks"}
        tables.append(table(rows, shown, **title, box=None, padding=(0, 1, 0, 0)))
    return tables


_AFTER = Column("after", 0)
_MATRIX: dict[str, Any] = {
    "title": "Accuracy [%] on the classes of each task",
    "title_justify": "left",
}


def _number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _headline_table(data: RunData) -> Table:
    faa, aia, lost = data.headline
    time = duration(data.seconds()["total_s"])
    counts = f"{count_of(len(data.rounds), 'round')}, {count_of(len(data.tasks), 'task')}"
    rows = [
        ("FAA", percent(faa), "accuracy after the last task, mean over tasks"),
        ("AIA", percent(aia), "the same after each task, mean over all of them"),
        ("forgetting", points(lost), "from each task's best accuracy to its last"),
        ("time", time, counts),
    ]
    if data.best is not None:
        what = f"state {data.best.state}, of all images after task {data.best.task}"
        rows.insert(-1, ("best", percent(data.best.accuracy), what))
    columns = (Column("", 0, style="bold"), Column("", 1, right=True), Column("", 2, wraps=True))
    return table(rows, columns, show_header=False, box=None, padding=(0, 2, 0, 0))


def _bytes_table(data: RunData) -> Table:
    look = {"title": "Bytes, all clients", "title_justify": "left", "box": box.SIMPLE_HEAD}
    shown = table(_byte_rows(data), _BYTES, **look)
    shown.add_section()
    totals = [data.bytes_of(d) for d in Direction]
    shown.add_row("run", "", "", *_sizes(*totals))
    if any(b.wire_kernel for b in totals):
        up, down = (format_bytes(b.wire_kernel) for b in totals)
        shown.add_row("", "kernel", "", "", up, "", down)
    return shown


_BYTES = (
    Column("task", 0),
    Column("round", 1),
    Column("counted", 2, right=True),
    Column("up: tensors", 3, right=True, wraps=True),
    Column("up: wire", 4, right=True, wraps=True, style="bold"),
    Column("down: tensors", 5, right=True, wraps=True),
    Column("down: wire", 6, right=True, wraps=True, style="bold"),
)


def _sizes(up: Bytes, down: Bytes) -> list[str]:
    return [format_bytes(n) for b in (up, down) for n in (b.tensor, b.wire)]


def _byte_rows(data: RunData) -> Iterator[tuple[Any, ...]]:
    """Yield (task, round, who counted, sizes); many rounds are summed by task and kind."""
    one_by_one = len(data.rounds) <= _OPEN_ROUNDS
    for (task, kind), group in groupby(data.rounds, key=lambda v: (v.round.task, v.round.kind)):
        views = list(group)
        if one_by_one:
            for v in views:
                counted = f"{len(v.counted)} of {len(v.round.asked)}"
                yield task, f"{kind} {v.round.round}", counted, *_sizes(v.up, v.down)
            continue
        counted = (
            f"{sum(len(v.counted) for v in views)} of {sum(len(v.round.asked) for v in views)}"
        )
        up, down = sum_bytes(v.up for v in views), sum_bytes(v.down for v in views)
        yield task, f"{kind} x {len(views)}", counted, *_sizes(up, down)


def show_comparison(runs: comparison.Named, folder: Path) -> None:
    """Print the headline numbers of several runs, and the path of the page."""
    columns = [Column(title, i, right=i > 1) for i, title in enumerate(COMPARISON_HEAD)]
    out = console()
    show_table(out, comparison.rows(runs), columns)
    out.print(f"files: {folder}/comparison.html, comparison.csv", soft_wrap=True)


def show_report(data: RunData, folder: Path) -> None:
    """Print a run's numbers and the path of its files."""
    out = console()
    for part in summary_tables(data, out):
        show(out, part)
    if budget := data.run.environment.get("budget"):
        out.print(budget["text"], soft_wrap=True)
    out.print(f"files: {folder}/report.html, summary.json, rounds.jsonl, ...", soft_wrap=True)


def show_demo(demo: Demo, form: Format) -> None:
    """Print the numbers of a demo that has come to its end, or give them as JSON."""
    with Ledger(demo.federation / LEDGER_NAME, read_only=True) as ledger:
        data = collect(ledger, ledger.runs.named(None).run_id)

    def show() -> None:
        show_report(data, demo.federation / "runs" / data.run.run_id)
        typer.echo(f"took {demo.took_s:.0f} s")

    emit(run_directory.summary(data)["data"], form, show)
