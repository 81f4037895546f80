"""Clients' reports on a task's classes: mean features and image counts.

The schema, the payload, its checks and the server's stacks of it (torch-free). A mean leaves a
client only if it stands for enough images: the mean of one image is that image's feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import TaskInfo, Update, Updates
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.client_weights import class_weights
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, TensorSpec

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

# (free symbol, known symbol) of a schema that holds `report_specs`
REPORT_AT_MOST = (("owned", "c"),)


def count_spec(name: str, rows: int | str) -> TensorSpec:
    """Return the spec of a vector of numbers >= 0: counts, class ids, flags."""
    return TensorSpec(name, Kind.COUNT, (rows,), dtype="I64", non_negative=True)


def tally_specs(rows: str = "c") -> tuple[TensorSpec, ...]:
    """Return the specs of `tally`; ``rows`` is the number of the classes that it is about."""
    return (count_spec("classes", rows), count_spec("count", rows), count_spec("n", 1))


def tally(classes: Iterable[int], counts: I64) -> dict[str, Array]:
    """Return ``classes`` and a client's images of each, ``count`` (c,), and of all, ``n`` (1,)."""
    return {
        "classes": np.asarray(tuple(classes), dtype=np.int64),
        "count": counts,
        "n": counts.sum(dtype=np.int64).reshape(1),
    }


def report_specs(mean: str = "mean") -> tuple[TensorSpec, ...]:
    """Return the tensors of a report; ``c`` is the number of the task's classes, ``d`` the width.

    ``mean`` (owned, d), under its given name, and ``owned`` (owned,) hold the classes with enough
    images, ``classes`` and ``count`` (c,) all of the task, ``n`` (1,) the images.
    """
    return (
        TensorSpec(mean, Kind.PROTOTYPE, ("owned", "d"), exact=True),
        count_spec("owned", "owned"),
        *tally_specs(),
    )


def report_tensors(
    classes: Sequence[int],
    means: NDArray[np.float64],
    counts: I64,
    least: int,
    mean: str = "mean",
) -> dict[str, Array]:
    """Return a client's report.

    Args:
        classes: the c class ids of the task.
        means: (c, d).
        counts: (c,).
        least: means of classes with fewer images stay on the client.
        mean: name of the tensor of means.
    """
    owned = counts >= least
    ids = np.asarray(classes, dtype=np.int64)
    return {
        mean: means[owned].astype(np.float32),
        "owned": ids[owned],
        **tally(classes, counts.astype(np.int64)),
    }


def count_faults(payload: Payload, task: TaskInfo) -> list[str]:
    """Return how ``classes``, ``count`` and ``n`` contradict each other or the task."""
    classes, counts = payload.i64("classes").tolist(), payload.i64("count").tolist()
    faults = []
    if classes != list(task.classes):
        faults.append(f"'classes': expected {list(task.classes)}, got {classes[:20]}")
    if any(count < 0 for count in counts):
        faults.append("'count' holds a negative number")
    total = int(payload.i64("n").sum())
    if total != sum(counts):
        faults.append(f"'n': expected {sum(counts)}, the sum of 'count', got {total}")
    return faults


def report_faults(least: int, payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which a report contradicts itself or the task."""
    counts, owned = payload.i64("count").tolist(), payload.i64("owned").tolist()
    faults = count_faults(payload, task)
    expected = [c for c, count in zip(task.classes, counts, strict=False) if count >= least]
    if owned != expected:
        faults.append(
            f"'owned': expected the classes with at least {least} images, {expected}, "
            f"got {owned[:20]}"
        )
    return faults


@dataclass(frozen=True)
class ClassReports:
    """All clients' prototypes and class means, stacked in ClientId order.

    Attributes:
        protos: (K, c, d).
        means: (K, c, d), zero where the client sent none.
        counts: (K, c), images behind each mean; zero where the client sent none.
    """

    protos: F32
    means: F32
    counts: I64

    @classmethod
    def of(cls, updates: Updates, classes: Sequence[int]) -> ClassReports:
        """Read the reports, and ``proto`` (c, d), of all updates."""
        # A copy: a view would keep the client's entire update in memory.
        read = [(update.payload.f32("proto").copy(), *_read(update, classes)) for update in updates]
        return cls(*(np.stack(column) for column in zip(*read, strict=True)))


def federated_means(
    updates: Updates, classes: Sequence[int], max_share: float, mean: str = "mean"
) -> tuple[NDArray[np.float64], I64]:
    """Return the class means over all images of all clients, one report in memory at a time.

    The updates are opened twice: the weights of a class need every client's counts.

    Args:
        updates: with reports.
        classes: the c class ids of the task.
        max_share: largest weight of one client in a class that others have as well.
        mean: name of the tensor of means.

    Returns:
        Means (c, d), zero for a class without images, and total counts (c,).
    """
    counts = np.stack([_read(update, classes, mean)[1] for update in updates])  # (K, c)
    weights = class_weights(counts, max_share)  # (K, c)
    terms = (
        share[:, None] * _read(update, classes, mean)[0].astype(np.float64)
        for share, update in zip(weights, updates, strict=True)
    )
    merged = next(terms)  # (c, d)
    for term in terms:
        merged += term
    return merged, counts.sum(axis=0, dtype=np.int64)


def _read(update: Update, classes: Sequence[int], name: str = "mean") -> tuple[F32, I64]:
    """Return one client's means (c, d) and the images behind each (c,)."""
    sent = update.payload
    rows = class_positions(sent.i64("owned"), classes)
    mean = np.zeros((len(classes), sent.tensors[name].shape[1]), dtype=np.float32)
    mean[rows] = sent.f32(name)
    count = np.zeros(len(classes), dtype=np.int64)
    count[rows] = sent.i64("count")[rows]
    return mean, count
