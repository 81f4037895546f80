"""Accuracy of the global model after each task, and forgetting.

S_{t,i} is the accuracy in percent on the test images of task i's classes after task t, over all
classes seen so far and without a task id; i <= t. T is the number of evaluated tasks. The measures
derived from it are in docs/methods/README.md, "Measures". Undefined values (no test images) are
None, never NaN and never zero.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.rows import Evaluation

Matrix = NDArray[np.float64]
Row = tuple[float | None, ...]

FORGETTING = ("max", "diag", "fedmammoth")  # the first is the default


@dataclass(frozen=True)
class Metrics:
    """The numbers of one run, in percent unless said otherwise.

    Attributes:
        tasks: T, the number of evaluated tasks.
        matrix: S_{t,i} for i <= t, pooled over clients: images right / images.
        matrix_macro: the same, as the mean of the accuracies of task i's classes.
        task_mean: A_t, the mean of S_{t,i} over i <= t.
        sample_weighted: images right / images over all seen classes.
        macro: the mean of the accuracies of all seen classes.
        faa: A_{T-1} of the task mean; ``faa_sample_weighted`` of the other.
        aia: the mean of A_t over t; None if one is undefined.
        forgetting: percentage points by definition (`FORGETTING`); negative is kept.
        forgetting_matched: the same, each term over clients present in both evaluations.
        coverage: share of seen classes with at least one test image, 0 to 1, after task t.
        test_images: number of images in the evaluation after task t.
        evaluators: number of clients that took part in it.
    """

    tasks: int
    matrix: tuple[Row, ...]
    matrix_macro: tuple[Row, ...]
    task_mean: Row
    sample_weighted: Row
    macro: Row
    faa: float | None
    faa_sample_weighted: float | None
    aia: float | None
    aia_sample_weighted: float | None
    forgetting: Mapping[str, float | None]
    forgetting_matched: Mapping[str, float | None]
    coverage: tuple[float, ...]
    test_images: tuple[int, ...]
    evaluators: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers; undefined ones are None."""
        return asdict(self)


Headline = tuple[float | None, float | None, float | None]


def headline(m: Metrics | None) -> Headline:
    """Return FAA and AIA in percent, and forgetting in points by the default definition."""
    return (m.faa, m.aia, m.forgetting[FORGETTING[0]]) if m else (None, None, None)


class Measured:
    """A run that was measured on the clients' test images, on the server's, or on both."""

    pooled: Metrics | None
    central: Metrics | None

    @property
    def metrics(self) -> Metrics | None:
        """Metrics for headlines: on the clients' test images, or else on the server's folder."""
        return self.pooled or self.central

    @property
    def headline(self) -> Headline:
        """FAA, AIA and forgetting."""
        return headline(self.metrics)


def pooled(rows: Iterable[Evaluation], tasks: Sequence[Sequence[int]]) -> Metrics | None:
    """Compute the metrics over the clients' own test images; None before any evaluation.

    ``tasks`` lists the class ids of each task. The server's test folder is excluded.
    """
    return compute([r for r in rows if r.client != CENTRAL], tasks)


def central(rows: Iterable[Evaluation], tasks: Sequence[Sequence[int]]) -> Metrics | None:
    """Compute the metrics over the server's test folder alone; None if there is none."""
    return compute([r for r in rows if r.client == CENTRAL], tasks)


def compute(rows: Iterable[Evaluation], tasks: Sequence[Sequence[int]]) -> Metrics | None:
    """Compute the metrics of these rows, all evaluators pooled."""
    counts = _Counts(rows, tasks)
    T = counts.evaluated  # number of evaluated tasks
    if T == 0:
        return None
    S = counts.matrix()  # (T, T), NaN where undefined
    S_macro = counts.matrix_macro()  # (T, T)
    A = [_mean(S[t, : t + 1]) for t in range(T)]
    A_weighted = [counts.over_seen(t) for t in range(T)]
    return Metrics(
        tasks=T,
        matrix=_triangle(S),
        matrix_macro=_triangle(S_macro),
        task_mean=_row(A),
        sample_weighted=_row(A_weighted),
        macro=_row([_mean(counts.class_accuracy[t, : counts.seen[t]]) for t in range(T)]),
        faa=_number(A[-1]),
        faa_sample_weighted=_number(A_weighted[-1]),
        aia=_number(float(np.mean(A))),
        aia_sample_weighted=_number(float(np.mean(A_weighted))),
        forgetting=forgetting(S - S[-1]),
        forgetting_matched=counts.forgetting_matched(),
        coverage=tuple(float(np.mean(counts.total[t, : counts.seen[t]] > 0)) for t in range(T)),
        test_images=tuple(int(counts.total[t, : counts.seen[t]].sum()) for t in range(T)),
        evaluators=tuple(len(counts.clients(t)) for t in range(T)),
    )


def forgetting(drop: Matrix) -> dict[str, float | None]:
    """Compute F by every definition from the drops S_{t,i} - S_{T-1,i}, (T, T).

    - ``max``: mean over i < T-1 of the largest drop over t in [i, T-2].
    - ``diag``: mean over i < T-1 of the drop from t = i.
    - ``fedmammoth``: the sum of the diag terms over T, the last task's zero included.

    Undefined terms (NaN) are excluded from the means. 0 for one task.
    """
    T = len(drop)
    if T == 1:
        return dict.fromkeys(FORGETTING, 0.0)
    largest, diagonal = [], []
    for i in range(T - 1):
        column = drop[i : T - 1, i]
        known = column[~np.isnan(column)]
        if known.size:
            largest.append(float(known.max()))
        if not np.isnan(drop[i, i]):
            diagonal.append(float(drop[i, i]))
    return {
        "max": _number(_mean(np.array(largest))),
        "diag": _number(_mean(np.array(diagonal))),
        "fedmammoth": sum(diagonal) / (len(diagonal) + 1) if diagonal else None,
    }


class _Counts:
    """Right and tested images, per class and per evaluator; classes in order of their tasks.

    Per class over all evaluators, per evaluator over the classes of a task: both for each evaluator
    would take gigabytes at a thousand of them.
    """

    def __init__(self, rows: Iterable[Evaluation], tasks: Sequence[Sequence[int]]) -> None:
        order = [c for classes in tasks for c in classes]
        column = {c: j for j, c in enumerate(order)}
        ends = np.cumsum([len(classes) for classes in tasks], dtype=np.int64)
        # An evaluation can only cover classes that its task had already seen.
        kept = [
            r
            for r in rows
            if 0 <= r.task < len(tasks) and column.get(r.class_id, len(order)) < ends[r.task]
        ]
        T = self.evaluated = 1 + max((r.task for r in kept), default=-1)
        self.seen: list[int] = [int(e) for e in ends[:T]]  # |C_<=t|
        self._starts: list[int] = [0, *self.seen]
        names = sorted({r.client for r in kept})
        index = {name: k for k, name in enumerate(names)}
        self._correct = np.zeros((T, len(order)), np.int64)  # (T, C)
        self.total = np.zeros((T, len(order)), np.int64)  # (T, C)
        self._right = np.zeros((len(names), T, T), np.int64)  # (K, T, T)
        self._tested = np.zeros((len(names), T, T), np.int64)  # (K, T, T)
        for r in kept:
            k, c = index[r.client], column[r.class_id]
            i = bisect_right(self.seen, c)  # the task of the class
            self._correct[r.task, c] += r.correct
            self.total[r.task, c] += r.total
            self._right[k, r.task, i] += r.correct
            self._tested[k, r.task, i] += r.total
        self.class_accuracy = _percent(self._correct, self.total)  # (T, C)

    def clients(self, t: int) -> Collection[int]:
        """Return the evaluators that tested anything after task t."""
        return [int(k) for k in np.flatnonzero(self._tested[:, t].sum(axis=1))]

    def _classes(self, i: int) -> slice:
        return slice(self._starts[i], self._starts[i + 1])

    def matrix(self) -> Matrix:
        """S, pooled over clients."""
        return _lower(_percent(self._right.sum(axis=0), self._tested.sum(axis=0)))

    def matrix_macro(self) -> Matrix:
        """S, as the mean over classes."""
        T = self.evaluated
        means = [
            [_mean(self.class_accuracy[t, self._classes(i)]) for i in range(T)] for t in range(T)
        ]
        return _lower(np.array(means))

    def over_seen(self, t: int) -> float:
        """Images right / images after task t, in percent."""
        seen = slice(self.seen[t])
        correct = self._correct[t, seen].sum()
        return float(_percent(correct, self.total[t, seen].sum()))

    def forgetting_matched(self) -> dict[str, float | None]:
        """Forgetting, with both accuracies of a drop from the same clients."""
        T = self.evaluated
        right, tested = self._right, self._tested
        both = (tested > 0) & (tested[:, -1:] > 0)  # (K, T, T): in evaluation t and in the last
        before = _percent((right * both).sum(axis=0), (tested * both).sum(axis=0))
        last = (np.repeat(c[:, -1:], T, axis=1) * both for c in (right, tested))
        after = _percent(*(c.sum(axis=0) for c in last))
        return forgetting(_lower(before - after))


def _percent(correct: Any, total: Any) -> Any:
    """100 correct / total, NaN if nothing was tested."""
    correct, total = np.asarray(correct, np.float64), np.asarray(total, np.float64)
    out = np.full(total.shape, np.nan)
    return np.divide(100.0 * correct, total, out=out, where=total > 0)


def _lower(S: Matrix) -> Matrix:
    """Blank the tasks that were not seen yet, i > t."""
    return np.where(np.tri(len(S), dtype=bool), S, np.nan)


def _mean(values: NDArray[np.float64]) -> float:
    """Mean of the defined values, NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _row(values: Iterable[float]) -> Row:
    return tuple(_number(v) for v in values)


def _triangle(S: Matrix) -> tuple[Row, ...]:
    return tuple(_row(S[t, : t + 1]) for t in range(len(S)))
