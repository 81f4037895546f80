"""HGP's server half: average prompts and head, keep Gaussians, rebalance the head (torch)."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.methods.hgp.head import (
    discriminant,
    head_tensors,
    rebalanced,
    rows_of,
    with_mean_row,
    with_rows,
)
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import pool_names
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import (
    CURRENT,
    current_task,
    kept_parts,
    of_task,
    tagged,
    task_part,
)
from fcil_adapters.toolkit.gaussians.discriminant_head import DISCRIMINANT
from fcil_adapters.toolkit.gaussians.store import (
    entry_tensors,
    merge_entries,
    read_entries,
    sent_entries,
)
from fcil_adapters.toolkit.heads.distances import draw_linear
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.prompts.initial import draw_pool

_POOLS, _HEAD = 1, 2  # purposes of the random streams


class Aggregator:
    """The state: prompts and Gaussians of every task, and one head for all seen classes.

    ``task.<t>.key.<pool>``, ``task.<t>.prompt.<pool>``, ``gauss.<t>...``, ``head.weight``,
    ``head.bias``, ``classes``, ``seen``, and ``discriminant...`` with a quadratic head. Gaussians
    are never broadcast.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        d = ctx.backbone_info.dim
        head = head_tensors(ctx, np.zeros((0, d)), np.zeros(0), np.zeros(0), np.zeros(0))
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
        head = head_tensors(
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
        own = rows_of(state, classes)
        start = of_task(state, t, pool_names(h.pools)) | {n: state.f32(n)[own] for n in HEAD}
        mean = average(ctx, updates, tuple(start), weights, start)
        sent, counts = sent_entries(h, updates, t, ctx.device)
        known = read_entries(state, [t])
        entries = merge_entries(known, sent, classes, drop_stale=h.drop_stale)
        head = with_rows(state, classes, (mean["head.weight"], mean["head.bias"]))
        if len(classes) == 1:
            head = with_mean_row(ctx, state, head, entries)
        head = rebalanced(ctx, state, head, entries)
        seen = state.i64("seen").copy()
        described = {entry.label for entry in entries}
        learned = [len(classes) > 1 or c in described for c in classes]  # a lone row is not trained
        seen[own] |= counts.any(axis=0) & np.array(learned)
        pools = ctx.forms.commit_named({name: mean[name] for name in pool_names(h.pools)})
        return State(
            {
                **state.tensors,
                **{f"task.{t}.{name}": pool for name, pool in pools.items()},
                **entry_tensors(entries, t, ctx.backbone_info.dim),
                **head_tensors(ctx, *head, state.i64("classes"), seen),
                **discriminant(ctx, state, entries),
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
            *kept_parts(state, DISCRIMINANT),
        )
