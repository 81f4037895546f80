"""A linear head's rows on the server: first values, averages, the row of a lone class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fcil_adapters.contract import Context, Updates
from fcil_adapters.numerics.class_means import merge_means
from fcil_adapters.numerics.client_weights import class_weights
from fcil_adapters.toolkit.heads.distances import mean_row
from fcil_adapters.toolkit.heads.rows import F32, I64, HeadRows

_HEAD = 2  # purpose of the random stream
_SPREAD = 0.01  # standard deviation of new rows


def first_rows(ctx: Context) -> HeadRows:
    """Draw the rows of a task's classes from N(0, 0.01^2), without bias."""
    shape = (len(ctx.task.classes), ctx.backbone_info.dim)
    return HeadRows(
        weight=(_SPREAD * ctx.rng(_HEAD).standard_normal(shape)).astype(np.float32),
        bias=np.zeros(shape[0], dtype=np.float32),
        classes=np.asarray(ctx.task.classes, dtype=np.int64),
        seen=np.zeros(shape[0], dtype=bool),
    )


def averaged_rows(mean: Mapping[str, F32], counts: I64, rows: HeadRows, *, past: bool) -> HeadRows:
    """Return the rows after a round; the row of a class without images stays.

    Args:
        mean: the averages of ``head.weight`` (rows, d) and ``head.bias`` (rows,).
        counts: (K, c), images of each of the task's classes, the last c rows.
        rows: the rows before this round.
        past: True if the rows before the last c are averages too.
    """
    c = counts.shape[1]
    owned = counts.sum(0) > 0  # (c,)
    before = len(rows.classes) - c
    fresh = np.concatenate([np.full(before, past), owned])
    now = np.concatenate([np.zeros(before, dtype=bool), owned])
    return HeadRows(
        weight=np.where(fresh[:, None], mean["head.weight"], rows.weight),
        bias=np.where(fresh, mean["head.bias"], rows.bias),
        classes=rows.classes,
        seen=rows.seen | now,
    )


def mean_by_class(
    updates: Updates, counts: I64, rows: HeadRows, max_share: float
) -> dict[str, F32]:
    """Average each of the task's rows with the clients' images of its class, streaming.

    Args:
        updates: with `HEAD`.
        counts: (K, c), images of each of the task's classes, the last c rows.
        rows: give the shapes; the rows before the last c come out as zeros.
        max_share: cap on a client's weight in a class that others have as well.
    """
    c = counts.shape[1]
    weight = np.zeros(rows.weight.shape, dtype=np.float64)
    bias = np.zeros(rows.bias.shape, dtype=np.float64)
    for share, update in zip(class_weights(counts, max_share), updates, strict=True):
        weight[-c:] += share[:, None] * update.payload.tensors["head.weight"][-c:]
        bias[-c:] += share * update.payload.tensors["head.bias"][-c:]
    return {"head.weight": weight.astype(np.float32), "head.bias": bias.astype(np.float32)}


def lone_row(
    means: F32, counts: I64, rows: HeadRows, past: Sequence[HeadRows], max_share: float
) -> HeadRows:
    """Return the row of a task's only class: its federated mean, as long as past rows are.

    A cross-entropy with one column has no gradient, so nothing else can teach the row. At the first
    task its length is 1.

    Args:
        means: (K, d), the clients' mean features; no columns if no client sent one.
        counts: (K, 1), images behind each mean.
        rows: the task's row, the last one if there are others.
        past: finished tasks' rows.
        max_share: cap on a client's weight.
    """
    if means.shape[1] == 0:
        return rows
    merged, total = merge_means(means[:, None, :], counts, max_share)  # (1, d), (1,)
    if total[0] == 0 or not merged.any():
        return rows
    others = np.concatenate([rows.weight[:0], *(one.weight[one.seen] for one in past)])
    weight, seen = rows.weight.copy(), rows.seen.copy()
    weight[-1] = mean_row(merged[0], others)
    seen[-1] = True
    return replace(rows, weight=weight, seen=seen)
