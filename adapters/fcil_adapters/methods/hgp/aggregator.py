"""HGP's server half: average prompts and head, keep Gaussians, rebalance the head (torch)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Array, Context, Kind, Part, State, Updates
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import pool_names
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import CURRENT, current_task, of_task, tagged, task_part
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.rebalance import fit_to_mixture
from fcil_adapters.toolkit.gaussians.store import (
    Entry,
    entry_tensors,
    merge_entries,
    read_entries,
    sent_entries,
)
from fcil_adapters.toolkit.heads.distances import draw_linear, mean_row
from fcil_adapters.toolkit.prompts.initial import draw_pool
from fcil_adapters.toolkit.prompts.parts import HEAD

F32 = NDArray[np.float32]
Head = tuple[F32, F32]  # weight (C, d), bias (C,)

_POOLS, _HEAD, _SAMPLES, _ORDER = 1, 2, 3, 4  # purposes of the random streams


class Aggregator:
    """The state: prompts and Gaussians of every task, and one head for all seen classes.

    ``task.<t>.key.<pool>``, ``task.<t>.prompt.<pool>``, ``gauss.<t>...``, ``head.weight``,
    ``head.bias``, ``classes``, ``seen``. Gaussians are never broadcast.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        d = ctx.backbone_info.dim
        head = _head_tensors(ctx, np.zeros((0, d)), np.zeros(0), np.zeros(0), np.zeros(0))
        return tagged(head, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw orthonormal prompts and keys, and rows of the head."""
        h: HgpHparams = ctx.hparams
        t, d = ctx.task.index, ctx.backbone_info.dim
        assert t == current_task(state) + 1, "tasks open one after the other"
        tensors: dict[str, Array] = dict(state.tensors)
        for i, name in enumerate(pool_names(h.pools)):
            shape = (h.prompts, d) if name.startswith("key.") else (h.prompts, h.length, d)
            past = [state.f32(f"task.{s}.{name}") for s in range(t)]
            drawn = {name: draw_pool(ctx.rng(_POOLS, i), shape, past)}
            tensors[f"task.{t}.{name}"] = ctx.forms.commit_named(drawn)[name]
        weight, bias = draw_linear(ctx.rng(_HEAD), len(ctx.task.classes), d)
        head = _head_tensors(
            ctx,
            np.concatenate([state.f32("head.weight"), weight]),
            np.concatenate([state.f32("head.bias"), bias]),
            np.concatenate([state.i64("classes"), ctx.task.classes]),
            np.concatenate([state.i64("seen"), np.zeros(len(ctx.task.classes))]),
        )
        return tagged({**tensors, **head, **entry_tensors([], t, d)}, t)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average what was trained, renew the Gaussians, retrain the head on samples of them."""
        h: HgpHparams = ctx.hparams
        t, classes = ctx.task.index, ctx.task.classes
        weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
        own = _rows(state, classes)
        start = of_task(state, t, pool_names(h.pools)) | {n: state.f32(n)[own] for n in HEAD}
        mean = average(ctx, updates, tuple(start), weights, start)
        sent, counts = sent_entries(h, updates, t, ctx.device)
        known = read_entries(state, [t])
        entries = merge_entries(known, sent, classes, drop_stale=h.drop_stale)
        head = _with_rows(state, classes, (mean["head.weight"], mean["head.bias"]))
        if len(classes) == 1:
            head = _with_mean_row(ctx, state, head, entries)
        head = _rebalanced(ctx, state, head, entries)
        seen = state.i64("seen").copy()
        seen[own] |= counts.any(axis=0)
        pools = ctx.forms.commit_named({name: mean[name] for name in pool_names(h.pools)})
        return State(
            {
                **state.tensors,
                **{f"task.{t}.{name}": pool for name, pool in pools.items()},
                **entry_tensors(entries, t, ctx.backbone_info.dim),
                **_head_tensors(ctx, *head, state.i64("classes"), seen),
            },
            state.meta,
        )

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the whole head, and the prompts of each task, of which the last still change."""
        current = current_task(state)
        if current < 0:
            return ()
        names = pool_names(ctx.hparams.pools)
        head = {n: state.tensors[n] for n in (*HEAD, "classes", "seen")}
        pools = [tagged(of_task(state, t, names), t) for t in range(current + 1)]
        return (
            Part(CURRENT, tagged(head, current)),
            *(Part(task_part(t), payload) for t, payload in enumerate(pools)),
        )


def _with_mean_row(ctx: Context, state: State, head: Head, entries: Sequence[Entry]) -> Head:
    """Set the only new class's row to its federated mean; without one it stays as it was."""
    label = ctx.task.classes[0]
    mixture = _mixture(ctx, entries)
    if not mixture.classes:
        return head
    past = _rows(state, ctx.task.past)
    known = past[state.i64("seen")[past] > 0]
    row = mean_row(mixture.mean(label), head[0][known]).astype(np.float32)
    return _with_rows(state, [label], (row[None], np.zeros(1, dtype=np.float32)), head)


def _rebalanced(ctx: Context, state: State, head: Head, entries: Sequence[Entry]) -> Head:
    """Retrain the rows of the classes that can be sampled; the others stay."""
    h: HgpHparams = ctx.hparams
    if h.rebalance == "off":
        return head
    past = read_entries(state, range(ctx.task.index)) if h.rebalance == "seen" else []
    mixture = _mixture(ctx, [*past, *entries])
    if len(mixture.classes) < 2:
        return head  # one column's cross-entropy is 0
    rows = _rows(state, mixture.classes)
    start = head[0][rows], head[1][rows]
    fitted = fit_to_mixture(ctx, h, mixture, start, (_SAMPLES, _ORDER))
    return _with_rows(state, mixture.classes, fitted, head)


def _mixture(ctx: Context, entries: Sequence[Entry]) -> Mixture:
    weights = ctx.hparams.class_weights
    return make_mixture(entries, ctx.task.seen, weights, ctx.max_weight_share, ctx.device)


def _with_rows(state: State, classes: Sequence[int], new: Head, head: Head | None = None) -> Head:
    """Return a head (the state's, unless given) with other rows for some classes."""
    weight, bias = head or (state.f32("head.weight"), state.f32("head.bias"))
    weight, bias, rows = weight.copy(), bias.copy(), _rows(state, classes)
    weight[rows], bias[rows] = new
    return weight, bias


def _rows(state: State, classes: Sequence[int]) -> NDArray[np.int64]:
    ids = np.asarray(classes, dtype=np.int64)
    return class_positions(ids, state.i64("classes").tolist())


def _head_tensors(
    ctx: Context,
    weight: NDArray[np.floating],
    bias: NDArray[np.floating],
    classes: NDArray[np.number],
    seen: NDArray[np.number],
) -> dict[str, Array]:
    return {
        "head.weight": ctx.forms.commit(Kind.HEAD, weight),
        "head.bias": ctx.forms.commit(Kind.HEAD, bias),
        "classes": classes.astype(np.int64),
        "seen": seen.astype(np.int64),
    }
