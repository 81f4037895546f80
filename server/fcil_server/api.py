"""fcil from Python: run an experiment, read what one has measured, read a federation's run.

The same engine as ``scripts/reproduce`` and the same ledger as the reports: processes that speak
over sockets, results that any of the two goes on with. ``docs/python.md`` is the user's page.

Accuracies and forgetting are in percent, sizes in bytes, times in seconds.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from fcil_protocol.errors import ConfigError
from fcil_server import rundir
from fcil_server.beside import where
from fcil_server.frames import frame, moments, need
from fcil_server.lab import records
from fcil_server.lab.engine import Table
from fcil_server.lab.experiment import Experiment, Metric, parse
from fcil_server.lab.experiment import load as load_toml
from fcil_server.lab.plan import Cell
from fcil_server.lab.show import Show
from fcil_server.lab.summary import Entry, entries
from fcil_server.ledger import LEDGER_NAME, Ledger
from fcil_server.rundata import RunData, collect
from fcil_server.runs import run_named

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FailedCells", "Result", "Run", "load", "open_run", "run"]

Where = str | os.PathLike[str]


class FailedCells(RuntimeWarning):
    """Some cells of an experiment have no result; `Result.failed` says why."""


# --- experiments ----------------------------------------------------------------------------


def run(
    experiment: Where | Mapping[str, Any] | Experiment,
    *,
    data: Where | None = None,
    results: Where | None = None,
    only: str | Sequence[str] = (),
    seeds: Iterable[int] = (),
    jobs: int = 1,
    progress: bool = True,
) -> Result:
    """Run the cells of an experiment that have no result yet, and return all that is measured.

    Interrupted at any moment (the kernel's "interrupt", a kill), the same call goes on with the
    next cell; so does ``scripts/reproduce`` on the same results.

    Args:
        experiment: a TOML (``docs/lab.md``), or its keys as a mapping.
        data: folder or zip of the images, where the experiment needs one.
        results: their folder; ``results/NAME`` by default, of the TOML's or the title's name.
        only: ``ROW`` or ``ROW/PARTITION``, one or several; empty: all.
        seeds: of the experiment's; empty: all.
        jobs: cells at the same time.
        progress: words on standard error while it runs.

    Warns:
        FailedCells: of cells that failed; the others have their results.

    Raises:
        ConfigError, DataError: the experiment or its data is wrong; nothing ran.
        UsageError: pandas is not installed.
    """
    need()
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; expected 1 or more.")
    table = _table(experiment, results, only, seeds)
    show = Show() if progress else Show(Console(quiet=True))
    failed = table.run(None if data is None else Path(data), jobs, show)
    if failed:
        text = "\n".join(f"{name}: {why}" for name, why in failed.items())
        warnings.warn(f"{len(failed)} cells failed:\n{text}", FailedCells, stacklevel=2)
    return _result(table, failed)


def load(
    experiment: Where | Mapping[str, Any] | Experiment, *, results: Where | None = None
) -> Result:
    """Return what of an experiment has been measured so far; nothing runs.

    It may be read while the experiment runs elsewhere.

    Args:
        experiment: as for `run`.
        results: their folder; ``results/NAME`` by default.

    Raises:
        NotYet: it never ran. ConfigError: the experiment is wrong.
        UsageError: pandas is not installed.
    """
    need()
    return _result(_table(experiment, results, (), ()), {})


def _table(
    given: Where | Mapping[str, Any] | Experiment,
    results: Where | None,
    only: str | Sequence[str],
    seeds: Iterable[int],
) -> Table:
    if isinstance(given, Experiment):
        experiment = given
    elif isinstance(given, Mapping):
        experiment = parse(dict(given), _name(given.get("title")))
    else:
        experiment = load_toml(Path(given))
    folder = None if results is None else Path(results)
    chosen = [only] if isinstance(only, str) else list(only)
    command = f"fcil_server.api.run, experiment {experiment.name!r}"
    return Table.of(experiment, folder, only=chosen, seeds=list(seeds), command=command)


def _name(title: object) -> str:
    """Return the name of a results' folder for an experiment that is not a file."""
    words = re.findall(r"[a-z0-9]+", str(title).lower())
    return "-".join(words)[:64].rstrip("-") or "experiment"


def _result(table: Table, failed: Mapping[str, str]) -> Result:
    finished = table.results.finished(table.cells, table.results.known())
    return Result(
        table.experiment, table.results.folder, tuple(table.cells), finished, dict(failed)
    )


@dataclass(frozen=True)
class Result:
    """What an experiment has measured: every finished cell, of earlier calls too.

    Attributes:
        experiment: as it was checked.
        folder: of its results; ``report.html`` and ``report.md`` are in it.
        failed: cells that failed in this call, each with why.
    """

    experiment: Experiment
    folder: Path
    _cells: tuple[Cell, ...] = field(repr=False)
    _finished: Mapping[str, Mapping[str, Any]] = field(repr=False)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Names of the experiment's cells that have no result yet."""
        return [c.name for c in self._cells if c.name not in self._finished]

    @cached_property
    def _entries(self) -> list[Entry]:
        return entries(self.experiment, self._cells, self._finished)

    def table(self, metric: Metric = "faa", *, deviation: bool = False) -> pd.DataFrame:
        """Return the paper's table: rows by partitions, means over the finished seeds.

        Args:
            metric: ``faa``, ``aia`` or ``forgetting``.
            deviation: that over seeds (n - 1) instead of the mean.

        Raises:
            ConfigError: there is no such metric.
        """
        if metric not in get_args(Metric):
            raise ConfigError(f"there is no metric {metric!r}; expected faa, aia or forgetting.")
        column = f"{metric}_{'deviation' if deviation else 'mean'}"
        wide = self.summary.pivot_table(
            index="row", columns="partition", values=column, dropna=False, sort=False
        )
        rows = [r.title for r in self.experiment.rows]
        return wide.reindex(rows, columns=[p.name for p in self.experiment.partitions])

    @property
    def summary(self) -> pd.DataFrame:
        """Means and deviations over seeds, of each row and partition."""
        return frame(records.of_summary(self._entries), records.SUMMARY_COLUMNS)

    @property
    def cells(self) -> pd.DataFrame:
        """One line for each finished cell; sizes without ``run_`` are of a client's round."""
        return frame(records.of_cells(self._cells, self._finished), records.CELL_COLUMNS)

    @property
    def curves(self) -> pd.DataFrame:
        """Accuracy over all tasks seen so far, after each task of each cell."""
        return frame(records.of_curves(self._cells, self._finished), records.CURVE_COLUMNS)

    @property
    def matrices(self) -> pd.DataFrame:
        """Accuracy on each task after each task, of each cell."""
        return frame(records.of_matrices(self._cells, self._finished), records.MATRIX_COLUMNS)

    @property
    def bytes(self) -> pd.DataFrame:
        """A cell's bytes by cause and direction; ``connection`` is the kernel's count of all."""
        return frame(records.of_bytes(self._cells, self._finished), records.BYTE_COLUMNS)

    @property
    def papers(self) -> pd.DataFrame:
        """What papers say, in their own settings."""
        return frame(records.of_papers(self.experiment), records.PAPER_COLUMNS)

    @property
    def claims(self) -> pd.DataFrame:
        """What became of the papers' claims."""
        found = records.of_claims(self.experiment, self._entries)
        return frame(found, records.CLAIM_COLUMNS)

    def __repr__(self) -> str:
        done = len(self._cells) - len(self.missing)
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"<Result of {self.experiment.title!r}: {done} of {len(self._cells)} cells{failed}>"

    def _repr_html_(self) -> str:
        table: str = self.table().to_html(float_format="{:.1f}".format, na_rep="")
        return table


# --- a federation's run ---------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of a real federation as its reports show it; it may still go on."""

    _data: RunData = field(repr=False)

    @property
    def id(self) -> str:
        """The run's id."""
        return self._data.run.run_id

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds: method, accuracies, bytes, seconds."""
        content: dict[str, Any] = rundir.summary(self._data)["data"]
        return content

    @property
    def rounds(self) -> pd.DataFrame:
        """One line for each closed round: who took part, true bytes, seconds."""
        table = frame(rundir.round_records(self._data), rundir.ROUND_COLUMNS)
        for column in ("opened_at", "closed_at"):
            table[column] = moments(table[column])
        return table

    @property
    def bytes(self) -> pd.DataFrame:
        """What ``bytes.csv`` holds: a line for each flow of each round, client and cause."""
        return frame(rundir.byte_records(self._data), rundir.BYTE_COLUMNS)

    @property
    def accuracy(self) -> pd.DataFrame:
        """S_{t,i}: accuracy on task i (columns) after task t (index)."""
        m = self._data.metrics
        rows = () if m is None else m.matrix
        tasks = range(len(rows))
        lines = [dict(enumerate(row)) for row in rows]
        table = frame(lines, tasks)
        return table.rename_axis(index="after_task", columns="task").astype("float64")

    def __repr__(self) -> str:
        run = self._data.run
        return f"<Run {run.run_id}: {run.method}, {run.status.value}>"


def open_run(place: Where, run: str | None = None) -> Run:
    """Read a run from a federation's directory, or from one of the directories in its ``runs/``.

    Nothing is written, and the server may be at work.

    Args:
        place: the directory.
        run: id or its beginning; the newest by default.

    Raises:
        UsageError: there is no such run, or pandas is not installed.
    """
    need()
    directory, named = where(Path(place))
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        return Run(collect(ledger, run_named(ledger, run or named).run_id))
