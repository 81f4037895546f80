"""fcil from Python: run an experiment, read its results, read a federation's run.

The same engine as ``scripts/reproduce`` and the same ledger as the reports: processes that speak
over sockets, results that both can resume. ``docs/python.md`` is the user's page.

Accuracies and forgetting are in percent, sizes in bytes, times in seconds.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from fcil_protocol.errors import ConfigError
from fcil_server.lab import records
from fcil_server.lab.engine import Engine
from fcil_server.lab.experiment import Experiment, Metric, parse
from fcil_server.lab.experiment import load as load_toml
from fcil_server.lab.plan import Cell
from fcil_server.lab.progress import Show
from fcil_server.lab.records import frame, moments, need_pandas
from fcil_server.lab.summary import Content, RowSummary, entries
from fcil_server.ledger.databases.database import Row
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.results.run_data import RunData, collect, locate_run

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FailedCells", "Result", "Run", "load", "open_run", "run"]

AnyPath = str | os.PathLike[str]
AnyExperiment = AnyPath | Mapping[str, Any] | Experiment


class FailedCells(RuntimeWarning):
    """Warning about cells of an experiment without a result; `Result.failed` has the reasons."""


# --- experiments ----------------------------------------------------------------------------


def run(
    experiment: AnyExperiment,
    *,
    data: AnyPath | None = None,
    results: AnyPath | None = None,
    only: str | Iterable[str] = (),
    seeds: Iterable[int] = (),
    jobs: int = 1,
    progress: bool = True,
) -> Result:
    """Run the cells of an experiment that have no result yet, and return all results.

    After an interruption at any moment (the kernel's "interrupt", a kill), the same call resumes
    with the next cell; so does ``scripts/reproduce`` on the same results.

    Args:
        experiment: a TOML (``docs/lab.md``), its keys as a mapping, or `Result.experiment`.
        data: folder or zip of the images, if the experiment needs one.
        results: their folder; ``results/NAME`` by default, of the TOML's or the title's name.
        only: ``ROW`` or ``ROW/PARTITION``, one or several; empty: all.
        seeds: of the experiment's; empty: all.
        jobs: cells at the same time.
        progress: messages on standard error while it runs.

    Warns: FailedCells: some cells failed; the others have their results.

    Raises:
        ConfigError, DataError: an argument, the experiment or its data is wrong; nothing ran.
        Locked: another call or command runs in this folder of results.
        StorageError: results cannot be written.
        UsageError: pandas is not installed.
    """
    need_pandas()
    images = None if data is None else _path("data", data)
    with _expecting("jobs", jobs, "a whole number"):
        at_once = operator.index(jobs)
    if at_once < 1:
        raise ConfigError(f"jobs is {jobs}; expected 1 or more.")
    engine = _engine(experiment, results, only, seeds)
    failed = engine.run(images, at_once, Show() if progress else Show(Console(quiet=True)))
    if failed:
        text = "\n".join(f"{name}: {why}" for name, why in failed.items())
        words = f"{len(failed)} of {len(engine.chosen)} cells failed:\n{text}"
        warnings.warn(words, FailedCells, stacklevel=2)
    return _result(engine, failed)


def load(experiment: AnyExperiment, *, results: AnyPath | None = None) -> Result:
    """Return the results of an experiment so far; nothing runs.

    It may be read while the experiment runs elsewhere.

    Args:
        experiment: as for `run`.
        results: their folder; ``results/NAME`` by default.

    Raises:
        NotYet: it never ran. ConfigError: the experiment is wrong.
        StorageError: the system does not allow reading a result.
        UsageError: pandas is not installed.
    """
    need_pandas()
    return _result(_engine(experiment, results, (), ()), {})


def _engine(
    given: AnyExperiment, results: AnyPath | None, only: str | Iterable[str], seeds: Iterable[int]
) -> Engine:
    if isinstance(given, Experiment):
        experiment = given
    elif isinstance(given, Mapping):
        experiment = parse(dict(given), _name(given.get("title")))
    else:
        experiment = load_toml(_path("experiment", given, "the path of a TOML, or its keys"))
    folder = None if results is None else _path("results", results)
    with _expecting("only", only, "ROW or ROW/PARTITION, one or several"):
        names = [only] if isinstance(only, str) else [str(name) for name in only]
    with _expecting("seeds", seeds, "whole numbers, such as [1, 2]"):
        numbers = [operator.index(seed) for seed in seeds]
    command = f"fcil_server.api.run, experiment {experiment.name!r}"
    return Engine.of(experiment, folder, only=names, seeds=numbers, command=command)


def _name(title: object) -> str:
    """Return the name of a results' folder for an experiment that is not a file."""
    words = re.findall(r"[a-z0-9]+", str(title).lower())
    return "-".join(words)[:64].rstrip("-") or "experiment"


def _path(what: str, given: AnyPath, expected: str = "a path") -> Path:
    # Without the expansion a results' folder named "~" would be created.
    with _expecting(what, given, expected):
        return Path(given).expanduser()


@contextmanager
def _expecting(what: str, given: object, expected: str) -> Iterator[None]:
    """Turn Python's error about an argument of another type into a sentence."""
    try:
        yield
    except (TypeError, RuntimeError) as error:  # the latter: no user has this home
        raise ConfigError(f"{what} is {given!r}; expected {expected}.") from error


def _result(engine: Engine, failed: Mapping[str, str]) -> Result:
    kept = engine.results
    finished = kept.finished(engine.cells, kept.known())
    return Result(engine.experiment, kept.folder, failed, tuple(engine.cells), finished)


@dataclass(frozen=True)
class Result:
    """Results of an experiment: every finished cell, of earlier calls too.

    Attributes:
        experiment: as it was checked.
        folder: of its results; ``report.html`` and ``report.md`` are in it.
        failed: cells that failed in this call, each with its reason.
    """

    experiment: Experiment
    folder: Path
    failed: Mapping[str, str]
    _cells: tuple[Cell, ...]
    _finished: Mapping[str, Content]

    @property
    def missing(self) -> list[str]:
        """Names of the experiment's cells that have no result yet."""
        return [c.name for c in self._cells if c.name not in self._finished]

    @cached_property
    def _entries(self) -> list[RowSummary]:
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
        """Papers' numbers, in their own settings."""
        return frame(records.of_papers(self.experiment), records.PAPER_COLUMNS)

    @property
    def claims(self) -> pd.DataFrame:
        """Verdicts on the papers' claims."""
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
    """One run of a real federation as its reports show it; it may still be active."""

    _data: RunData
    _flows: Sequence[Row]

    @property
    def id(self) -> str:
        """The run's id."""
        return self._data.run.run_id

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``: method, accuracies, bytes, seconds."""
        content: dict[str, Any] = run_directory.summary(self._data)["data"]
        return content

    @property
    def rounds(self) -> pd.DataFrame:
        """One line for each closed round: participants, true bytes, seconds."""
        table = frame(run_directory.round_records(self._data), run_directory.ROUND_COLUMNS)
        for column in ("opened_at", "closed_at"):
            table[column] = moments(table[column])
        return table

    @property
    def bytes(self) -> pd.DataFrame:
        """Content of ``bytes.csv``: a line for each flow of each round, client and cause."""
        return frame(map(dict, self._flows), run_directory.BYTE_COLUMNS)

    @property
    def accuracy(self) -> pd.DataFrame:
        """S_{t,i}: accuracy on task i (columns) after task t (index)."""
        m = self._data.metrics
        rows = () if m is None else m.matrix
        table = frame([dict(enumerate(row)) for row in rows], range(len(rows)))
        return table.rename_axis(index="after_task", columns="task")

    def __repr__(self) -> str:
        run = self._data.run
        return f"<Run {run.run_id}: {run.method}, {run.status.value}>"


def open_run(place: AnyPath, run: str | None = None) -> Run:
    """Read a run from a federation's directory, or from one of the directories in its ``runs/``.

    The ledger is only read, and the server may run.

    Args:
        place: the directory.
        run: id or its beginning; the newest by default.

    Raises:
        UsageError: there is no such run, or pandas is not installed.
        CorruptFile, StorageError: the ledger cannot be read.
    """
    need_pandas()
    # Resolved, since the name "." does not identify a run.
    directory, named = locate_run(_path("place", place).resolve())
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger, ledger.database.moment():
        found = ledger.runs.named(str(run) if run else named).run_id
        return Run(collect(ledger, found), ledger.bytes.records(found))
