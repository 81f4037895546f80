"""The server's half: merge the means of a task, then the covariance that all tasks share."""

import numpy as np

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.numerics.class_means import merge_means
from fcil_adapters.numerics.client_weights import sample_weights, weighted_mean


class Aggregator:
    """The state: ``<t>.mean``, ``.count``, ``.classes`` of each task t; ``cov`` of ``n`` images."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        cov = np.zeros((ctx.hparams.side**2, ctx.hparams.side**2), dtype=np.float32)
        return State({"cov": cov, "n": np.zeros(1, dtype=np.int64)})

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes nobody has described yet."""
        tensors, t, c = dict(state.tensors), ctx.task.index, len(ctx.task.classes)
        tensors[f"{t}.mean"] = np.zeros((c, ctx.hparams.side**2), dtype=np.float32)
        tensors[f"{t}.count"] = np.zeros(c, dtype=np.int64)
        tensors[f"{t}.classes"] = np.array(ctx.task.classes, dtype=np.int64)
        return State(tensors)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Return the state with a round's updates merged in, weighted by their images."""
        tensors, t = dict(state.tensors), ctx.task.index
        if ctx.kind == "prepare":
            sent = [update.payload for update in updates]
            mean, tensors[f"{t}.count"] = merge_means(
                np.stack([p.f32("mean") for p in sent]),  # (K, c, pixels)
                np.stack([p.i64("count") for p in sent]),  # (K, c)
                ctx.max_weight_share,
            )
            tensors[f"{t}.mean"] = mean.astype(np.float32)
        else:
            weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
            fresh = weighted_mean(updates, ["cov"], weights)["cov"].astype(np.float64)
            old, more = state.i64("n"), sum(updates.samples)
            cov = (old * state.f32("cov").astype(np.float64) + more * fresh) / (old + more)
            tensors["cov"], tensors["n"] = cov.astype(np.float32), old + more
        return State(tensors)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared covariance, and the means of each task as a part of its own."""
        parts = [Part("shared", State({"cov": state.tensors["cov"]}))]
        opened = sum(name.endswith(".classes") for name in state.tensors)
        for t in range(opened):
            tensors = {k: state.tensors[f"{t}.{k}"] for k in ("mean", "count", "classes")}
            parts.append(Part("current" if t == opened - 1 else f"task/{t}", State(tensors)))
        return tuple(parts)
