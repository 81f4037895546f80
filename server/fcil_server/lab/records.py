"""Results as plain tables: lists of records, the same for CSV and for data frames.

Accuracies and forgetting are in percent, sizes in bytes, times in seconds. Unmeasured values are
None. pandas is an extra, so it is imported only for frames.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError
from fcil_server.lab.experiment import Experiment
from fcil_server.lab.plan import Cell
from fcil_server.lab.summary import METRICS, Content, RowSummary, Stat, judge_claim, look

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
# Column -> path in a cell's file.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "faa": ("faa",),
    "aia": ("aia",),
    "forgetting": ("forgetting", "max"),
    "up_tensor": ("per_client_round", "up_tensor"),
    "down_tensor": ("per_client_round", "down_tensor"),
    "up_wire": ("per_client_round", "up_true_wire"),
    "down_wire": ("per_client_round", "down_true_wire"),
    "run_up_wire": ("bytes", "up", "true_wire"),
    "run_down_wire": ("bytes", "down", "true_wire"),
    "wall_s": ("seconds", "wall_s"),
    "cpu_s": ("seconds", "cpu_s"),
    "peak_memory_mb": ("peak_memory_mb",),
    "train_images": ("train_images",),
    "features_read": ("features", "read"),
    "features_computed": ("features", "computed"),
    "rounds": ("rounds", "all"),
    "rounds_not_done": ("rounds", "not_done"),
    "updates": ("rounds", "updates"),
    "excluded": ("rounds", "excluded"),
}
_WHICH = ("row", "partition", "seed")
CELL_COLUMNS = (*_WHICH, "method", *_NUMBERS, "key")
CURVE_COLUMNS = (*_WHICH, "after_task", "accuracy")
MATRIX_COLUMNS = (*_WHICH, "after_task", "task", "accuracy")
_SIZES = ("tensor", "sealed", "application", "wire", "wire_kernel", "retransmitted", "link")
BYTE_COLUMNS = (*_WHICH, "cause", "direction", *_SIZES)
_STATS = ("faa", "aia", "forgetting", "up_wire", "down_wire", "wall_s")
SUMMARY_COLUMNS = (
    "row", "partition", "seeds", "missing",
    *(f"{name}_{what}" for name in _STATS for what in ("mean", "deviation")),
)  # fmt: skip
PAPER_COLUMNS = ("row", "partition", "source", *METRICS)
CLAIM_COLUMNS = ("text", "source", "left", "right", "partition", "metric", "verdict", "measured")
# Columns with text, in all tables; the others are numbers.
TEXT = frozenset(
    (
        "run", "row", "partition", "method", "key", "kind", "outcome", "closed_by", "client",
        "client_name", "cause", "direction", "source", "text", "left", "right", "metric", "verdict",
        "measured",
    )
)  # fmt: skip


def of_cells(cells: Sequence[Cell], finished: Mapping[str, Content]) -> Iterator[Record]:
    """Yield one record for each finished cell; sizes without ``run_`` are of a client's round."""
    for cell, content in _done(cells, finished):
        numbers = {name: look(content, path) for name, path in _NUMBERS.items()}
        yield {**_which(cell), "method": cell.method, **numbers, "key": content["key"]}


def of_curves(cells: Sequence[Cell], finished: Mapping[str, Content]) -> Iterator[Record]:
    """Yield A_t, the mean over the tasks seen so far, for each cell and task t."""
    for cell, content in _done(cells, finished):
        for t, accuracy in enumerate(content["task_mean"]):
            yield {**_which(cell), "after_task": t, "accuracy": accuracy}


def of_matrices(cells: Sequence[Cell], finished: Mapping[str, Content]) -> Iterator[Record]:
    """Yield S_{t,i}, the accuracy on task i after task t, for each cell and i <= t."""
    for cell, content in _done(cells, finished):
        for t, accuracies in enumerate(content["matrix"]):
            for i, accuracy in enumerate(accuracies):
                yield {**_which(cell), "after_task": t, "task": i, "accuracy": accuracy}


def of_bytes(cells: Sequence[Cell], finished: Mapping[str, Content]) -> Iterator[Record]:
    """Yield a run's bytes, all clients together, for each cell, cause and direction.

    The cause ``connection`` is the kernel's count of all the others together.
    """
    for cell, content in _done(cells, finished):
        for cause, ways in content["bytes"]["by_cause"].items():
            for direction, sizes in ways.items():
                known = {name: sizes.get(name) for name in _SIZES}
                yield {**_which(cell), "cause": cause, "direction": direction, **known}


def of_summary(found: Sequence[RowSummary]) -> Iterator[Record]:
    """Yield means and deviations over seeds for each row and partition."""
    for entry in found:
        stats: dict[str, Stat] = {
            "faa": entry.faa,
            "aia": entry.aia,
            "forgetting": entry.forgetting["max"],
            "up_wire": entry.up_wire,
            "down_wire": entry.down_wire,
            "wall_s": entry.seconds,
        }
        record: Record = {"row": entry.row, "partition": entry.partition}
        record |= {"seeds": len(entry.seeds), "missing": len(entry.missing)}
        for name, stat in stats.items():
            record |= {f"{name}_mean": stat.mean, f"{name}_deviation": stat.deviation}
        yield record


def of_papers(experiment: Experiment) -> Iterator[Record]:
    """Yield papers' numbers for each row and partition, in their own setting."""
    for paper in experiment.papers:
        for row, by_partition in paper.figures.items():
            for partition, figures in by_partition.items():
                where = {"row": row, "partition": partition, "source": paper.source}
                yield {**where, **figures.model_dump()}


def of_claims(experiment: Experiment, found: Sequence[RowSummary]) -> Iterator[Record]:
    """Yield the verdicts on the papers' claims."""
    for claim in experiment.claims:
        judged = judge_claim(claim, found)
        fields = claim.model_dump(exclude={"direction"})
        yield {**fields, "verdict": judged.verdict, "measured": judged.words}


def cells_csv(cells: Sequence[Cell], finished: Mapping[str, Content]) -> str:
    """Return ``cells.csv``; unmeasured values are empty fields."""
    out = io.StringIO()
    table = csv.DictWriter(out, CELL_COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(of_cells(cells, finished))
    return out.getvalue()


def _done(cells: Sequence[Cell], finished: Mapping[str, Content]) -> Iterator[tuple[Cell, Content]]:
    """Yield finished cells row by row, in the TOML's order; cells run seed by seed."""
    rows = {name: i for i, name in enumerate(dict.fromkeys(c.row for c in cells))}
    parts = {name: i for i, name in enumerate(dict.fromkeys(c.partition for c in cells))}
    for cell in sorted(cells, key=lambda c: (rows[c.row], parts[c.partition])):  # stable
        if cell.name in finished:
            yield cell, finished[cell.name]


def _which(cell: Cell) -> Record:
    return {"row": cell.row, "partition": cell.partition, "seed": cell.seed}


def need_pandas() -> None:
    """Check early that frames can be made: not after hours of work.

    Raises:
        UsageError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise UsageError(
            "tables as data frames need pandas, which is not installed.",
            action="Install it with: pip install 'fcil[lab]'",
        )


def frame(records: Iterable[Mapping[Any, Any]], columns: Sequence[str] | range) -> pd.DataFrame:
    """Return records as a frame, in their order; even without records it has its columns."""
    import pandas as pd

    table = pd.DataFrame.from_records(list(records), columns=list(columns))
    # pandas takes a column without values for objects, which it neither averages nor plots.
    empty = [c for c in columns if c not in TEXT and table[c].isna().all()]
    return table.astype(dict.fromkeys(empty, "float64"))


def moments(seconds: pd.Series) -> pd.Series:
    """Return seconds since 1970 as points in time, in UTC."""
    import pandas as pd

    return pd.to_datetime(seconds, unit="s", utc=True)
