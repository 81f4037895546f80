"""The server's half: merge the clients' means; finished tasks stay unchanged."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

import numpy as np

from fcil_adapters.contract import (
    Context,
    Part,
    State,
    Updates,
    classes_of,
    tasks_of,
    weight_cap,
)
from fcil_adapters.numerics.class_means import class_positions, merge_means


class Aggregator:
    """The state holds ``task.<t>.mean``, ``.count`` and ``.classes`` of every task."""

    def init(self, ctx: Context) -> State:
        """Return the empty state before the first task."""
        return State({}, {"task": -1})

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes have no means yet."""
        c, t = len(ctx.task.classes), ctx.task.index
        fresh = {
            f"task.{t}.mean": np.zeros((c, ctx.hparams.side**2), dtype=np.float32),
            f"task.{t}.count": np.zeros(c, dtype=np.int64),
            f"task.{t}.classes": np.asarray(ctx.task.classes, dtype=np.int64),
        }
        return State({**state.tensors, **fresh}, {"task": t})

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Merge this round's means with those of earlier rounds, by counts."""
        sent = [update.payload for update in updates]
        round_mean, round_count = merge_means(
            np.stack([p.f32("mean") for p in sent]),  # (K, c, pixels)
            np.stack([p.i64("count") for p in sent]),  # (K, c)
            weight_cap(ctx),
        )
        described, changed = classes_of(ctx.kind, ctx.task), dict(state.tensors)
        for t in tasks_of(ctx.kind, ctx.task):
            mean, count = f"task.{t}.mean", f"task.{t}.count"
            rows = class_positions(state.i64(f"task.{t}.classes"), described)
            merged, changed[count] = merge_means(
                np.stack([state.f32(mean), round_mean[rows]]),  # (2, c, pixels)
                np.stack([state.i64(count), round_count[rows]]),  # (2, c)
            )
            # Noise that masked clients add to sums takes a mean beyond what a pixel can be.
            changed[mean] = np.clip(merged, 0, 1).astype(np.float32)
        return State(changed, state.meta)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current task, and each finished one as a part that only late images change."""
        current = state.meta["task"]
        assert isinstance(current, int)
        names = ("mean", "count", "classes")
        return tuple(
            Part(
                "current" if t == current else f"task/{t}",
                State({name: state.tensors[f"task.{t}.{name}"] for name in names}),
            )
            for t in range(current + 1)
        )
