"""Several runs side by side: accuracy against bytes, one page, one table, one plot."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fcil_protocol.storage.atomic_files import write_atomic
from fcil_server.ledger.enums import CountSource, Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.reports.charts import charts
from fcil_server.reports.charts import history as snapshot
from fcil_server.reports.charts.history import History
from fcil_server.reports.results.run_data import (
    COMPARISON_HEAD,
    collect,
    comparison_row,
    locate_run,
)
from fcil_server.reports.sections import static_page
from fcil_server.reports.sections.accuracy import cost_by_task
from fcil_server.reports.sections.static_page import table

Named = Sequence[tuple[str, History]]


def read(places: Sequence[Path]) -> list[tuple[str, History]]:
    """Read the newest run of each federation directory, or the run of each run directory.

    Names are the methods', with the run's id if two are the same.

    Raises:
        UsageError: there is no run in one of the places.
    """
    found = [_read(place) for place in places]
    methods = [_run(history).method for history in found]
    return [
        (m if methods.count(m) == 1 else f"{m} {_run(history).run_id}", history)
        for m, history in zip(methods, found, strict=True)
    ]


def _run(history: History) -> RunRow:
    assert history.run is not None, "it was read by its name"
    return history.run


def _read(place: Path) -> History:
    directory, run = locate_run(place)
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        return snapshot.frozen(collect(ledger, ledger.runs.named(run).run_id))


def write(runs: Named, folder: Path) -> list[Path]:
    """Write ``comparison.html``, ``comparison.csv`` and, with matplotlib, pictures.

    Raises:
        StorageError, DiskFull: the folder cannot be written.
    """
    files = {
        "comparison.html": _html(runs).encode(),
        "comparison.csv": _csv(runs).encode(),
    }
    if importlib.util.find_spec("matplotlib") is not None:
        from fcil_server.reports import plots

        files.update(plots.cost(_lines(runs)))
    for name, content in files.items():
        write_atomic(folder / name, content)
    return [folder / name for name in files]


def rows(runs: Named) -> list[tuple[str, ...]]:
    """Return a line of headline numbers for each run."""
    ways = [[history.bytes_of(d) for d in Direction] for _, history in runs]
    return [
        comparison_row(name, _run(history).method, history.headline, sizes)
        for (name, history), sizes in zip(runs, ways, strict=True)
    ]


def _lines(runs: Named) -> list[tuple[str, list[tuple[int, float]]]]:
    return [(name, cost_by_task(history)) for name, history in runs]


def _wire_source(history: History) -> CountSource:
    """Return the source of the byte counts: the kernel, or prediction."""
    kernel = any(history.bytes_of(d).wire_kernel for d in Direction)
    return CountSource.KERNEL if kernel else CountSource.PREDICTED


def _html(runs: Named) -> str:
    sources = {_wire_source(history).value for _, history in runs}
    note = (
        "Up and down are TCP payload of all clients, "
        f"{' or '.join(sorted(sources))}; tensors are what papers count. Runs with different data "
        "or tasks cannot be compared this way."
    )
    chart = charts.static_html(charts.cost(_lines(runs)))
    return static_page.plain(
        "Runs side by side",
        f'{chart}{table(COMPARISON_HEAD, rows(runs), text=2)}<p class="faint">{escape(note)}</p>',
    )


def _csv(runs: Named) -> str:
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("run", "method", "after_task", "wire_bytes", "wire_source", "accuracy"))
    for _, history in runs:
        run, source = _run(history), _wire_source(history).value
        means = history.metrics.task_mean if history.metrics else ()
        known = [task for task, mean in enumerate(means) if mean is not None]
        for task, (size, accuracy) in zip(known, cost_by_task(history), strict=True):
            lines.writerow((run.run_id, run.method, task, size, source, f"{accuracy:.4f}"))
    return out.getvalue()
