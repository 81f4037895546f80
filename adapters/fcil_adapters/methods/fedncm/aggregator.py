"""FedNCM's server half: merge the clients' means by counts (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.statistics import merge_means
from fcil_adapters.tasks import CURRENT, current_task, of_task, tagged, task_part, with_task
from fcil_protocol.payload import Array

_NAMES = ("mean", "classes", "count")


class Aggregator:
    """The state holds ``task.<t>.mean``, ``.classes`` and ``.count`` of every task."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: nothing."""
        return tagged({}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes nobody has described yet."""
        c, t = len(ctx.task.classes), ctx.task.index
        fresh: dict[str, Array] = {
            "mean": np.zeros((c, ctx.backbone_info.dim), dtype=np.float32),
            "classes": np.asarray(ctx.task.classes, dtype=np.int64),
            "count": np.zeros(c, dtype=np.int64),
        }
        return with_task(tagged(state.tensors, t), t, fresh)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Merge the means sent with those that the task has, each weighted by its images."""
        t = ctx.task.index
        sent = [update.payload for update in updates]
        fresh, images = merge_means(
            np.stack([p.f32("mean") for p in sent]),  # (K, c, d)
            np.stack([p.i64("count") for p in sent]),  # (K, c)
            ctx.max_weight_share,
        )
        known = of_task(state, t, _NAMES)
        mean, count = merge_means(
            np.stack([known["mean"], fresh]),  # (2, c, d)
            np.stack([np.asarray(known["count"], dtype=np.int64), images]),  # (2, c)
        )
        return with_task(state, t, {"mean": mean.astype(np.float32), "count": count})

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current task, and each finished task as a part that never changes."""
        current = current_task(state)
        return tuple(
            Part(CURRENT if t == current else task_part(t), State(of_task(state, t, _NAMES)))
            for t in range(current + 1)
        )
