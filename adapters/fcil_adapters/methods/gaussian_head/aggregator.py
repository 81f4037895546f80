"""The Gaussian head's server half: keep Gaussians, make a linear head of them (torch)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import (
    Array,
    Context,
    Part,
    State,
    Updates,
    tasks_of,
    weight_cap,
)
from fcil_adapters.methods.gaussian_head.options import GaussianHeadHparams
from fcil_adapters.numerics.task_parts import CURRENT, current_task, tagged, with_task
from fcil_adapters.toolkit.gaussians.discriminants import (
    linear_discriminant,
    quadratic_tensors,
)
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.rebalance import fit_to_mixture
from fcil_adapters.toolkit.gaussians.store import (
    ClassEntry,
    add_entries,
    entry_tensors,
    merge_entries,
    read_entries,
    sent_entries,
)

_SAMPLES, _ORDER = 1, 2  # purposes of the random streams
_HEAD = ("weight", "bias", "classes")
_QUADRATIC = (*_HEAD, "turn", "offset")


class Aggregator:
    """The state: ``gauss.<t>...``, Gaussians of every task, and their head.

    If late images are counted, ``task.<t>.classes`` too, which assigns late Gaussians to tasks.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: no class is known."""
        h, d = ctx.hparams, ctx.backbone_info.dim
        if h.head == "quadratic":
            return tagged(quadratic_tensors(h, None, d), -1)
        return tagged(_head_tensors(np.zeros((0, d)), np.zeros(0), ()), -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Add an empty set of Gaussians for a task."""
        t = ctx.task.index
        opened = tagged({**state.tensors, **entry_tensors([], t, ctx.backbone_info.dim)}, t)
        if not ctx.hparams.counts_late:
            return opened
        return with_task(opened, t, {"classes": np.asarray(ctx.task.classes, dtype=np.int64)})

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Add the Gaussians sent to those of their tasks; compute the head again from all."""
        h: GaussianHeadHparams = ctx.hparams
        last, d = ctx.task.index, ctx.backbone_info.dim
        sent, _ = sent_entries(h, updates, last, ctx.device)
        by_task = {t: read_entries(state, [t]) for t in range(current_task(state) + 1)}
        renewed: dict[str, Array] = {}
        for t in tasks_of(ctx.kind, ctx.task):
            by_task[t] = _joined(ctx, state, t, by_task[t], sent)
            renewed |= entry_tensors(by_task[t], t, d)
        entries = [entry for some in by_task.values() for entry in some]
        mixture = make_mixture(entries, ctx.task.seen, h.class_weights, weight_cap(ctx), ctx.device)
        fresh = _head(ctx, mixture) if mixture.classes else {}
        return State({**state.tensors, **renewed, **fresh}, state.meta)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the head. Gaussians stay on the server."""
        names = _QUADRATIC if ctx.hparams.head == "quadratic" else _HEAD
        return (Part(CURRENT, State({name: state.tensors[name] for name in names})),)


def _joined(
    ctx: Context, state: State, task: int, old: list[ClassEntry], sent: list[ClassEntry]
) -> list[ClassEntry]:
    """Return a task's entries with those sent of its classes.

    They lie beside the old ones if late images are counted, and replace them otherwise.
    """
    if not ctx.hparams.counts_late:
        return merge_entries(old, sent, ctx.task.classes, drop_stale=False)
    classes = state.i64(f"task.{task}.classes").tolist()
    mine = [replace(entry, task=task) for entry in sent if entry.label in classes]
    return add_entries(old, mine, classes)


def _head(ctx: Context, mixture: Mixture) -> dict[str, Array]:
    """Return the head of the mixture's classes: a function of the mixture and the seed alone."""
    h: GaussianHeadHparams = ctx.hparams
    if h.head == "quadratic":
        return quadratic_tensors(h, mixture, ctx.backbone_info.dim)
    weight, bias = linear_discriminant(mixture, h.shrinkage)
    if h.head == "lda" or len(mixture.classes) < 2:  # one column's cross-entropy is 0
        return _head_tensors(weight, bias, mixture.classes)
    start = weight.astype(np.float32), bias.astype(np.float32)
    rows, offsets = fit_to_mixture(ctx, h, mixture, start, (_SAMPLES, _ORDER))
    return _head_tensors(rows, offsets, mixture.classes)


def _head_tensors(
    weight: NDArray[np.floating], bias: NDArray[np.floating], classes: tuple[int, ...]
) -> dict[str, Array]:
    return {
        "weight": weight.astype(np.float32),
        "bias": bias.astype(np.float32),
        "classes": np.asarray(classes, dtype=np.int64),
    }
