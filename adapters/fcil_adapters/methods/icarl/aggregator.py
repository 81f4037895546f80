"""iCaRL's server half: averages, and the class means of all clients (torch)."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Array, Context, Part, Payload, State, Updates
from fcil_adapters.methods.icarl.parts import MEANS
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.client_weights import class_weights
from fcil_adapters.toolkit.lora.halves import LoraAggregator


class Aggregator(LoraAggregator):
    """The state of `lora.server`, with ``means`` (known, d) and ``means.classes`` (known,)."""

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the model; or renew the means of all classes in the updates."""
        if ctx.kind != "finish":
            return super().aggregate(ctx, state, updates)
        seen = ctx.task.seen
        counts = np.zeros((len(updates), len(seen)), dtype=np.int64)  # (K, C)
        for row, update in zip(counts, updates, strict=True):
            sent = update.payload
            row[class_positions(sent.i64("owned"), seen)] = sent.i64("images")
        weights = class_weights(counts, ctx.max_weight_share)  # (K, C)
        merged = np.zeros((len(seen), ctx.backbone_info.dim))
        for share, update in zip(weights, updates, strict=True):
            sent = update.payload
            rows = class_positions(sent.i64("owned"), seen)
            merged[rows] += share[rows, None] * sent.f32("means").astype(np.float64)
        described = counts.sum(0) > 0
        fresh = {c: m for c, m, ok in zip(seen, merged, described, strict=True) if ok}
        return State({**state.tensors, **_named({**_known(state), **fresh}, ctx)}, state.meta)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts, and the means."""
        parts = super().broadcast(ctx, state)
        if not _known(state):
            return parts
        means = {"means": state.tensors["means"], "classes": state.tensors["means.classes"]}
        return (*parts, Part(MEANS, Payload(means)))


def _known(state: State) -> dict[int, Array]:
    if "means" not in state.tensors:
        return {}
    return dict(zip(state.i64("means.classes").tolist(), state.tensors["means"], strict=True))


def _named(known: dict[int, Array], ctx: Context) -> dict[str, Array]:
    order = [c for c in ctx.task.seen if c in known]
    rows = np.array([known[c] for c in order], dtype=np.float32)
    return {
        "means": rows.reshape(len(order), ctx.backbone_info.dim),
        "means.classes": np.array(order, dtype=np.int64),
    }
