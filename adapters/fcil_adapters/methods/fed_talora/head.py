"""The server's linear head: first rows, averages, and the row of a lone class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.arrays import class_weights
from fcil_adapters.contract import Context, Updates
from fcil_adapters.heads import mean_row
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import HeadRows
from fcil_adapters.statistics import merge_means

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

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


def average_head(
    updates: Updates, mean: Mapping[str, F32], counts: I64, rows: HeadRows, ctx: Context
) -> HeadRows:
    """Combine the clients' rows; the row of a class of the task that nobody has stays.

    Args:
        updates: with ``head.weight`` (rows, d) and ``head.bias`` (rows,).
        mean: their averages with the clients' weights; unused if rows have their own.
        counts: (K, c), images of each of the task's classes, the last c rows.
        rows: the rows before this round.
        ctx: options and the cap on a client's weight.
    """
    h: FedTaloraHparams = ctx.hparams
    c = counts.shape[1]
    owned = counts.sum(0) > 0  # (c,)
    fresh = np.concatenate([np.full(len(rows.classes) - c, h.head_average == "samples"), owned])
    if h.head_average == "rows":
        mean = _average_rows(updates, class_weights(counts, ctx.max_weight_share), rows)
    now = np.concatenate([np.zeros(len(rows.classes) - c, dtype=bool), owned])
    return HeadRows(
        weight=np.where(fresh[:, None], mean["head.weight"], rows.weight),
        bias=np.where(fresh, mean["head.bias"], rows.bias),
        classes=rows.classes,
        seen=rows.seen | now,
    )


def lone_row(
    means: F32,
    counts: I64,
    rows: HeadRows,
    past: Sequence[HeadRows],
    ctx: Context,
) -> HeadRows:
    """Return the row of a task's only class: its federated mean, as long as past rows are.

    A cross-entropy with one column has no gradient, so nothing else can teach the row. At the
    first task its length is 1.

    Args:
        means: (K, d), the clients' mean features; no columns if nobody sent one.
        counts: (K, 1), images behind each mean.
        rows: the task's row, the last one if there are others.
        past: finished tasks' rows.
        ctx: the cap on a client's weight.
    """
    if means.shape[1] == 0:
        return rows
    merged, total = merge_means(means[:, None, :], counts, ctx.max_weight_share)  # (1, d), (1,)
    if total[0] == 0 or not merged.any():
        return rows
    others = np.concatenate([rows.weight[:0], *(one.weight[one.seen] for one in past)])
    weight, seen = rows.weight.copy(), rows.seen.copy()
    weight[-1] = mean_row(merged[0], others)
    seen[-1] = True
    return replace(rows, weight=weight, seen=seen)


def _average_rows(updates: Updates, weights: F64, rows: HeadRows) -> dict[str, F32]:
    """Stream the last c rows with weights (K, c); the rows before them are left zero."""
    c = weights.shape[1]
    weight = np.zeros(rows.weight.shape, dtype=np.float64)
    bias = np.zeros(rows.bias.shape, dtype=np.float64)
    for share, update in zip(weights, updates, strict=True):
        weight[-c:] += share[:, None] * update.payload.tensors["head.weight"][-c:]
        bias[-c:] += share * update.payload.tensors["head.bias"][-c:]
    return {"head.weight": weight.astype(np.float32), "head.bias": bias.astype(np.float32)}
