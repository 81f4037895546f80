"""The server's half: merge what the clients say of a task (no torch)."""

import numpy as np
from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.numerics.class_means import merge_means
from fcil_adapters.numerics.client_weights import sample_weights, weighted_mean
from fcil_adapters.numerics.task_parts import (
    current_task,
    of_task,
    tagged,
    task_part,
    with_task,
)

NAMES = ("mean", "square", "classes", "count")


class Aggregator:
    """The state: ``task.<t>.<name>`` for each task t and the names above."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: nothing."""
        del ctx
        return tagged({}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes no client has described yet."""
        c, d, t = len(ctx.task.classes), ctx.backbone_info.dim, ctx.task.index
        fresh: dict[str, Array] = {
            "mean": np.zeros((c, d), dtype=np.float32),
            "square": np.zeros((1, d), dtype=np.float32),
            "classes": np.asarray(ctx.task.classes, dtype=np.int64),
            "count": np.zeros(c, dtype=np.int64),
        }
        return with_task(tagged(state.tensors, t), t, fresh)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Merge the round's updates, each weighted by its images."""
        sent = [update.payload for update in updates]
        mean, count = merge_means(
            np.stack([p.f32("mean") for p in sent]),  # (K, c, d)
            np.stack([p.i64("count") for p in sent]),  # (K, c)
            ctx.max_weight_share,
        )
        weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
        square = weighted_mean(updates, ["square"], weights)["square"]
        merged: dict[str, Array] = {
            "mean": mean.astype(np.float32),
            "square": square,
            "count": count,
        }
        return with_task(state, ctx.task.index, merged)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return each task as a part of its own; finished ones never change."""
        del ctx
        now = current_task(state)
        return tuple(
            Part(
                "current" if t == now else task_part(t), State(of_task(state, t, NAMES))
            )
            for t in range(now + 1)
        )
