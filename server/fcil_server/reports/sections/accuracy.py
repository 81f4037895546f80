"""The accuracy section: over tasks, the matrix as a heat map, forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fcil_protocol.formats import NOTHING, percent, points
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.history import History
from fcil_server.reports.results.metrics import FORGETTING, Metrics
from fcil_server.reports.sections.params import Params, cut

_NAMED = 12  # more columns than this are narrow: headed by numbers, in whole percents
_SHOWN = {"50": 20, "200": 50, "all": 100}  # tasks of the matrix, by the visitor's choice


@dataclass(frozen=True)
class AccuracyCell:
    """One accuracy: as text, and the class of its colour."""

    text: str
    look: str


@dataclass(frozen=True)
class MatrixRow:
    """The accuracies after a task, on the classes of each visible task."""

    task: int
    cells: tuple[AccuracyCell, ...]
    mean: float | None


@dataclass(frozen=True)
class Lost:
    """A task's best accuracy before the last one, when that was, and the drop since.

    Drops are the terms of the default definition of forgetting (`metrics.forgetting`): a gain is
    negative, and the newest task has none.
    """

    task: int
    first: float | None
    best: float | None
    best_at: int | None
    last: float | None
    lost: float | None


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    m = history.metrics
    if m is None:
        return {"m": None}
    shown = _SHOWN["all" if history.frozen else params.last]
    first = max(0, m.tasks - shown)
    lost = [forgotten(m, i) for i in range(m.tasks)]
    return {
        "m": m,
        "pooled": history.pooled is not None,
        "chart": charts.figure(charts.accuracy(m)),
        "cost": _cost_chart(history),
        "columns": range(first, m.tasks),
        "matrix": [_row(m, t, first) for t in range(first, m.tasks)],
        "first": first,
        "wide": m.tasks - first > _NAMED,
        "many": m.tasks > _SHOWN["50"],
        "lost": cut(lost[::-1], params.page),
        "definitions": definitions(history),
    }


def _cost_chart(history: History) -> Markup | str:
    points = cost_by_task(history)
    if history.run is None or history.unread or not points:  # old tasks' bytes are not known yet
        return ""
    return charts.figure(charts.cost([(history.run.method, points)]))


def _row(m: Metrics, t: int, first: int) -> MatrixRow:
    digits = 0 if m.tasks - first > _NAMED else 1
    return MatrixRow(t, tuple(_cell(v, digits) for v in m.matrix[t][first:]), m.task_mean[t])


def _cell(value: float | None, digits: int) -> AccuracyCell:
    text = NOTHING if value is None else f"{value:.{digits}f}"
    return AccuracyCell(text, look_of(value))


def look_of(value: float | None) -> str:
    """Return the class of an accuracy's colour: by tenths, the last only for 100 %."""
    if value is None:
        return "none"
    return f"h{min(10, max(0, int(value // 10)))}"


def forgotten(m: Metrics, task: int) -> Lost:
    """Return a task's best and last accuracy, and the drop."""
    column = [(m.matrix[t][task], t) for t in range(task, m.tasks)]
    known = [(v, t) for v, t in column[:-1] if v is not None]
    first, last = column[0][0], column[-1][0]
    if not known:
        return Lost(task, first, None, None, last, None)
    best, at = max(known, key=lambda pair: (pair[0], -pair[1]))
    return Lost(task, first, best, at, last, None if last is None else best - last)


def cost_by_task(history: History) -> list[tuple[int, float]]:
    """Return for each evaluated task the bytes on the wire until its end, and A_t in percent."""
    if history.metrics is None:
        return []
    mean = history.metrics.task_mean
    sizes = [0] * len(mean)
    for one in history.rounds:
        if one.key.task < len(sizes):
            sizes[one.key.task] += one.up.true_wire + one.down.true_wire
    found: list[tuple[int, float]] = []
    until = 0
    for size, accuracy in zip(sizes, mean, strict=True):
        until += size
        if accuracy is not None:
            found.append((until, accuracy))
    return found


def definitions(history: History) -> list[Sequence[str]]:
    """Return all ways to average, as rows of a table."""
    rows: list[Sequence[str]] = []
    for whose, m in (("clients", history.pooled), ("server's folder", history.central)):
        if m is None:
            continue
        rows.append((whose, "task mean (default)", percent(m.faa), percent(m.aia), ""))
        weighted = (percent(m.faa_sample_weighted), percent(m.aia_sample_weighted))
        rows.append((whose, "all images", *weighted, ""))
        rows.append((whose, "mean over classes", percent(m.macro[-1]), "", ""))
        rows += [
            (whose, f"forgetting, {name}", "", "", points(m.forgetting[name]))
            for name in FORGETTING
        ]
        if m.forgetting_matched != m.forgetting:
            matched = points(m.forgetting_matched[FORGETTING[0]])
            rows.append((whose, "forgetting, same clients before and after", "", "", matched))
    return rows
