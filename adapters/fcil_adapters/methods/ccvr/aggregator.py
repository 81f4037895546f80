"""CCVR's server half: average; at a task's end, make a head of the Gaussians (torch)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.methods.ccvr.options import CcvrHparams
from fcil_adapters.methods.ccvr.parts import (
    CALIBRATED,
    calibrated_rows,
    joined,
    with_calibrated,
    with_head,
)
from fcil_adapters.methods.ccvr.pooling import pooled
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.task_parts import current_task, kept_parts
from fcil_adapters.toolkit.gaussians.discriminants import quadratic_tensors
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.rebalance import fit_to_mixture
from fcil_adapters.toolkit.gaussians.store import (
    entry_tensors,
    merge_entries,
    read_entries,
    sent_entries,
)
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.lora.halves import LoraAggregator
from fcil_adapters.toolkit.lora.server import average_round, rows_of

_SAMPLES, _ORDER = 3, 4  # purposes of the random streams


class Aggregator(LoraAggregator):
    """State of `lora.server`, with ``gauss.<t>...`` of every task and the ``calibrated`` head."""

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw head rows, and at first the LoRA; a task without a finish keeps its rows."""
        last = current_task(state)
        if last >= 0 and ctx.hparams.head == "trained":
            rows = joined(calibrated_rows(state), rows_of(ctx.hparams, state, last))
            state = with_calibrated(ctx, state, rows)
        opened = super().open_task(ctx, state)
        none = entry_tensors([], ctx.task.index, ctx.backbone_info.dim)
        return State({**opened.tensors, **none}, opened.meta)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average with the clients' weights, or keep the Gaussians and calibrate."""
        if ctx.kind != "finish":
            past = None
            if ctx.hparams.head == "trained":  # the calibrated rows score
                past = [rows for rows in (calibrated_rows(state),) if rows is not None]
            return average_round(ctx, state, updates, past=past)
        t = ctx.task.index
        sent, _ = sent_entries(ctx.hparams, updates, t, ctx.device)
        own = merge_entries(read_entries(state, [t]), sent, ctx.task.classes, drop_stale=False)
        described = entry_tensors(own, t, ctx.backbone_info.dim)
        state = State({**state.tensors, **described}, state.meta)
        if ctx.hparams.head == "quadratic":
            mixture = _mixture(ctx, state, range(t + 1))
            head = quadratic_tensors(ctx.hparams, mixture, ctx.backbone_info.dim)
            return with_head(state, head)
        start = joined(calibrated_rows(state), rows_of(ctx.hparams, state, t))
        return with_calibrated(ctx, state, _calibrated(ctx, state, start))

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return LoRA and the current rows, and the calibrated head. Gaussians stay here."""
        return (*super().broadcast(ctx, state), *kept_parts(state, CALIBRATED))


def _calibrated(ctx: Context, state: State, rows: HeadRows) -> HeadRows:
    """Retrain the rows of the classes that can be sampled; the others stay."""
    h: CcvrHparams = ctx.hparams
    t = ctx.task.index
    mixture = _mixture(ctx, state, range(t + 1) if h.calibrate == "seen" else [t])
    if h.combine == "pooled":
        mixture = pooled(mixture)
    if len(mixture.classes) < 2:  # one column's cross-entropy is 0
        return rows
    own = class_positions(np.asarray(mixture.classes), rows.classes.tolist())
    start = rows.weight[own], rows.bias[own]
    weight, bias, seen = rows.weight.copy(), rows.bias.copy(), rows.seen.copy()
    weight[own], bias[own] = fit_to_mixture(ctx, h, mixture, start, (_SAMPLES, _ORDER))
    seen[own] = True  # also a class whose images came after the training rounds
    return replace(rows, weight=weight, bias=bias, seen=seen)


def _mixture(ctx: Context, state: State, tasks: Iterable[int]) -> Mixture:
    """Return the mixture of all clients' Gaussians of some tasks."""
    weights = ctx.hparams.class_weights
    entries = read_entries(state, tasks)
    return make_mixture(entries, ctx.task.seen, weights, ctx.max_weight_share, ctx.device)
