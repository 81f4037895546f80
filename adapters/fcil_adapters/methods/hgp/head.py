"""HGP's heads on the server: rows, a lone class's row, rebalancing, discriminant (torch)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Array, Context, Kind, State
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.task_parts import kept
from fcil_adapters.toolkit.gaussians.discriminant_head import DISCRIMINANT
from fcil_adapters.toolkit.gaussians.discriminants import quadratic_tensors
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.rebalance import fit_to_mixture
from fcil_adapters.toolkit.gaussians.store import ClassEntry, read_entries
from fcil_adapters.toolkit.heads.distances import mean_row

F32 = NDArray[np.float32]
Head = tuple[F32, F32]  # weight (C, d), bias (C,)

_SAMPLES, _ORDER = 3, 4  # purposes of the random streams, beside the aggregator's


def with_mean_row(ctx: Context, state: State, head: Head, entries: Sequence[ClassEntry]) -> Head:
    """Set the only new class's row to its federated mean; without one it stays as it was."""
    label = ctx.task.classes[0]
    mixture = _mixture(ctx, entries)
    if not mixture.classes:
        return head
    past = rows_of(state, ctx.task.past)
    known = past[state.i64("seen")[past] > 0]
    row = mean_row(mixture.mean(label), head[0][known]).astype(np.float32)
    return with_rows(state, [label], (row[None], np.zeros(1, dtype=np.float32)), head)


def rebalanced(ctx: Context, state: State, head: Head, entries: Sequence[ClassEntry]) -> Head:
    """Retrain the rows of the classes that can be sampled; the others stay."""
    h: HgpHparams = ctx.hparams
    if h.rebalance == "off" or h.head == "quadratic":
        return head
    past = read_entries(state, range(ctx.task.index)) if h.rebalance == "seen" else []
    mixture = _mixture(ctx, [*past, *entries])
    if len(mixture.classes) < 2:
        return head  # one column's cross-entropy is 0
    rows = rows_of(state, mixture.classes)
    start = head[0][rows], head[1][rows]
    fitted = fit_to_mixture(ctx, h, mixture, start, (_SAMPLES, _ORDER))
    return with_rows(state, mixture.classes, fitted, head)


def discriminant(ctx: Context, state: State, entries: Sequence[ClassEntry]) -> dict[str, Array]:
    """Return the tensors of the quadratic head, if there is one, as the state names them."""
    h: HgpHparams = ctx.hparams
    if h.head != "quadratic":
        return {}
    mixture = _mixture(ctx, [*read_entries(state, range(ctx.task.index)), *entries])
    return kept(DISCRIMINANT, quadratic_tensors(h, mixture, ctx.backbone_info.dim))


def _mixture(ctx: Context, entries: Sequence[ClassEntry]) -> Mixture:
    weights = ctx.hparams.class_weights
    return make_mixture(entries, ctx.task.seen, weights, ctx.max_weight_share, ctx.device)


def with_rows(state: State, classes: Sequence[int], new: Head, head: Head | None = None) -> Head:
    """Return a head (the state's, unless given) with other rows for some classes."""
    weight, bias = head or (state.f32("head.weight"), state.f32("head.bias"))
    weight, bias, rows = weight.copy(), bias.copy(), rows_of(state, classes)
    weight[rows], bias[rows] = new
    return weight, bias


def rows_of(state: State, classes: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows of classes in the state's head."""
    ids = np.asarray(classes, dtype=np.int64)
    return class_positions(ids, state.i64("classes").tolist())


def head_tensors(
    ctx: Context,
    weight: NDArray[np.floating],
    bias: NDArray[np.floating],
    classes: NDArray[np.number],
    seen: NDArray[np.number],
) -> dict[str, Array]:
    """Return the head as the state and the broadcast name it, as clients will decode it."""
    return {
        "head.weight": ctx.forms.commit(Kind.HEAD, weight),
        "head.bias": ctx.forms.commit(Kind.HEAD, bias),
        "classes": classes.astype(np.int64),
        "seen": seen.astype(np.int64),
    }
