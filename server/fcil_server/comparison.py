"""Several runs side by side: accuracy against bytes, one page, one table, one plot."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fcil_protocol.files import write_atomic
from fcil_server.beside import HEAD, row, where
from fcil_server.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger_rows import Direction
from fcil_server.page import charts, frozen
from fcil_server.report_claims import wire_source
from fcil_server.report_page import table
from fcil_server.rundata import RunData, collect, cost_by_task
from fcil_server.runs import run_named

Named = Sequence[tuple[str, RunData]]


def read(places: Sequence[Path]) -> list[tuple[str, RunData]]:
    """Read the newest run of each federation directory, or the run of each run directory.

    Names are the methods', with the run's id where two would be called alike.

    Raises:
        UsageError: there is no run in one of the places.
    """
    found = [_read(place) for place in places]
    methods = [data.run.method for data in found]
    return [
        (m if methods.count(m) == 1 else f"{m} {data.run.run_id}", data)
        for m, data in zip(methods, found, strict=True)
    ]


def _read(place: Path) -> RunData:
    directory, run = where(place)
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        return collect(ledger, run_named(ledger, run).run_id)


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
        from fcil_server import plots

        files.update(plots.cost(runs))
    for name, content in files.items():
        write_atomic(folder / name, content)
    return [folder / name for name in files]


def rows(runs: Named) -> list[tuple[str, ...]]:
    """Return a line of headline numbers for each run."""
    return [
        row(name, data.run.method, data.headline, [data.bytes_of(d) for d in Direction])
        for name, data in runs
    ]


def _html(runs: Named) -> str:
    sources = {wire_source(data).value for _, data in runs}
    note = (
        "Up and down are TCP payload of all clients, "
        f"{' or '.join(sorted(sources))}; tensors are what papers count. Runs of unlike data or "
        "tasks cannot be compared by this."
    )
    chart = charts.still(charts.cost([(name, cost_by_task(data)) for name, data in runs]))
    return frozen.plain(
        "Runs side by side",
        f'{chart}{table(HEAD, rows(runs), text=2)}<p class="faint">{escape(note)}</p>',
    )


def _csv(runs: Named) -> str:
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("run", "method", "after_task", "wire_bytes", "wire_source", "accuracy"))
    for _, data in runs:
        source = wire_source(data).value
        for task, (size, accuracy) in enumerate(cost_by_task(data)):
            where = (data.run.run_id, data.run.method, task)
            lines.writerow((*where, size, source, f"{accuracy:.4f}"))
    return out.getvalue()
