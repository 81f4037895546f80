"""FedNCM's server half: merge the clients' means by counts (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import (
    Array,
    Context,
    Part,
    State,
    Updates,
    classes_of,
    tasks_of,
    weight_cap,
)
from fcil_adapters.numerics.class_means import class_positions, merge_means
from fcil_adapters.numerics.client_weights import class_weights
from fcil_adapters.numerics.task_parts import (
    CURRENT,
    current_task,
    of_task,
    tagged,
    task_part,
    with_task,
)

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_NAMES = ("mean", "classes", "count")


class Aggregator:
    """The state holds ``task.<t>.mean``, ``.classes`` and ``.count`` of every task."""

    def init(self, ctx: Context) -> State:
        """Return the empty state before the first task."""
        return tagged({}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes have no means yet."""
        c, t = len(ctx.task.classes), ctx.task.index
        fresh: dict[str, Array] = {
            "mean": np.zeros((c, ctx.backbone_info.dim), dtype=np.float32),
            "classes": np.asarray(ctx.task.classes, dtype=np.int64),
            "count": np.zeros(c, dtype=np.int64),
        }
        return with_task(tagged(state.tensors, t), t, fresh)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Merge the means sent with the earlier ones, each weighted by its images."""
        share = weight_cap(ctx)
        fresh, images = _merged(updates, share)
        described = classes_of(ctx.kind, ctx.task)
        for t in tasks_of(ctx.kind, ctx.task):
            known = of_task(state, t, _NAMES)
            rows = class_positions(np.asarray(known["classes"], dtype=np.int64), described)
            mean, count = merge_means(
                np.stack([known["mean"], fresh[rows]]),  # (2, c, d)
                np.stack([np.asarray(known["count"], dtype=np.int64), images[rows]]),  # (2, c)
            )
            state = with_task(state, t, {"mean": mean.astype(np.float32), "count": count})
        return state

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current task, and each finished one as a part that only late images change."""
        current = current_task(state)
        return tuple(
            Part(CURRENT if t == current else task_part(t), State(of_task(state, t, _NAMES)))
            for t in range(current + 1)
        )


def _merged(updates: Updates, max_share: float) -> tuple[F64, I64]:
    """Return `merge_means` of the updates, with one client's means in memory at a time."""
    counts = np.stack([update.payload.i64("count").copy() for update in updates])  # (K, c)
    weights = class_weights(counts, max_share)  # (K, c)
    total: F64 = np.zeros(())
    for update, weight, count in zip(updates, weights, counts, strict=True):
        mean = np.where(count[:, None] > 0, update.payload.f32("mean"), 0)  # (c, d)
        total = total + weight[:, None] * mean
    return total, counts.sum(axis=0, dtype=np.int64)
