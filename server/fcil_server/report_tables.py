"""What a run came to, as tables for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.table import Table

from fcil_protocol.ids import RunId
from fcil_protocol.terminal import count_of
from fcil_server.ledger import Ledger
from fcil_server.ledger_words import Direction
from fcil_server.report_page import NOTHING, duration, percent, points
from fcil_server.rundata import Bytes, RunData, collect, format_bytes, sum_bytes

_OPEN_ROUNDS = 40  # more are summed by task and kind
_WIDE_TASKS = 8  # with more tasks the matrix has whole percents and no lines


def summary_tables(ledger: Ledger, run: RunId) -> list[RenderableType]:
    """Return what `fcil-server report` and the demo print: matrix, headline numbers, bytes."""
    data = collect(ledger, run)
    return [*_matrix_table(data), _headline_table(data), _bytes_table(data)]


def _matrix_table(data: RunData) -> list[RenderableType]:
    m = data.metrics
    if m is None:
        return []
    few = m.tasks <= _WIDE_TASKS
    table = Table(
        title="Accuracy [%] on the classes of each task",
        title_justify="left",
        box=box.HEAVY_HEAD if few else None,
        padding=(0, 1) if few else (0, 1, 0, 0),
    )
    table.add_column("after", no_wrap=True)
    for i in range(m.tasks):
        table.add_column(f"task {i}" if few else str(i), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", style="bold", no_wrap=True)
    for t, row in enumerate(m.matrix):
        cells = [NOTHING if v is None else f"{v:.{1 if few else 0}f}" for v in row]
        mean = m.task_mean[t]
        last = NOTHING if mean is None else f"{mean:.1f}"
        table.add_row(f"task {t}", *cells, *[""] * (m.tasks - 1 - t), last)
    return [table]


def _headline_table(data: RunData) -> RenderableType:
    faa, aia, lost = data.headline
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("FAA", percent(faa), "accuracy after the last task")
    table.add_row("AIA", percent(aia), "mean accuracy over all tasks")
    table.add_row("forgetting", points(lost), "from each task's best accuracy to its last")
    tasks = count_of(len(data.tasks), "task")
    time = duration(data.seconds()["total_s"])
    table.add_row("time", time, f"{count_of(len(data.rounds), 'round')}, {tasks}")
    return table


def _bytes_table(data: RunData) -> RenderableType:
    table = Table(title="Bytes, all clients", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("task", "round"):
        table.add_column(name, no_wrap=True)
    table.add_column("counted", justify="right", no_wrap=True)
    for way in ("up", "down"):
        table.add_column(f"{way}: tensors", justify="right")
        table.add_column(f"{way}: wire", justify="right", style="bold")
    for task, name, counted, up, down in _byte_rows(data):
        sizes = [format_bytes(n) for b in (up, down) for n in (b.tensor, b.wire)]
        table.add_row(str(task), name, counted, *sizes)
    table.add_section()
    totals = [data.bytes_of(d) for d in Direction]
    table.add_row("run", "", "", *(format_bytes(n) for b in totals for n in (b.tensor, b.wire)))
    if any(b.wire_kernel for b in totals):
        kernel = [format_bytes(b.wire_kernel) for b in totals]
        table.add_row("", "kernel", "", "", kernel[0], "", kernel[1])
    return table


def _byte_rows(data: RunData) -> Iterator[tuple[int, str, str, Bytes, Bytes]]:
    """Yield (task, round, who counted, up, down); many rounds are summed by task and kind."""
    one_by_one = len(data.rounds) <= _OPEN_ROUNDS
    for (task, kind), group in groupby(data.rounds, key=lambda v: (v.round.task, v.round.kind)):
        views = list(group)
        if one_by_one:
            for v in views:
                counted = f"{len(v.counted)} of {len(v.round.asked)}"
                yield task, f"{kind} {v.round.round}", counted, v.up, v.down
            continue
        counted = (
            f"{sum(len(v.counted) for v in views)} of {sum(len(v.round.asked) for v in views)}"
        )
        up, down = sum_bytes(v.up for v in views), sum_bytes(v.down for v in views)
        yield task, f"{kind} x {len(views)}", counted, up, down
