"""The analytic method's server half: add the sums up and solve (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.numerics.client_weights import allowed_counts
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.toolkit.closed_form.forms import read_upload
from fcil_adapters.toolkit.closed_form.lift import PROJECTION, SEED_WORDS
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.pseudo_labels import CENTRE_NAMES, PSEUDO, centres_of
from fcil_adapters.toolkit.closed_form.solving import solve
from fcil_adapters.toolkit.closed_form.sums import ProductSums

_TOTAL, _PSEUDO = "total", "pseudo"
_SEED = 1  # purpose of the random stream
_LARGEST_WORD = 2**62


class SumsAggregator:
    """The state: ``seed``, the sums, and their classifier.

    ``total.*`` (`ProductSums.tensors`); ``weight`` (C, D), ``bias`` (C,) and ``classes`` (C,), the
    classifier; if unlabelled images are counted, ``pseudo.*``, their sums, which stay apart, and
    `pseudo_labels.Centres`.
    """

    def init(self, ctx: Context) -> State:
        """Draw the seed of the projection; no class is known yet."""
        h: AnalyticHparams = ctx.hparams
        none = ProductSums.zero(h.width(ctx.backbone_info.dim))
        seed = ctx.rng(_SEED).integers(_LARGEST_WORD, size=SEED_WORDS, dtype=np.int64)
        return _solved(h, State({"seed": seed, **none.tensors(_TOTAL)}))

    def open_task(self, ctx: Context, state: State) -> State:
        """Return the state unchanged: a new class begins with its first image."""
        return state

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Add the updates, one in memory at a time, and solve for the classifier."""
        h: AnalyticHparams = ctx.hparams
        name = _PSEUDO if ctx.kind == PSEUDO else _TOTAL
        total = _read(state, name)
        for sums in _sent(ctx, updates):
            total += sums
        return _solved(h, State({**state.tensors, **total.tensors(name)}, state.meta))

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the classifier, and the seed that never changes. Sums stay on the server."""
        names = ["weight", "bias", "classes"]
        names += CENTRE_NAMES if ctx.hparams.counts_unlabelled else ()
        head = State({name: state.tensors[name] for name in names if name in state.tensors})
        return Part(CURRENT, head), Part(PROJECTION, State({"seed": state.tensors["seed"]}))


def _read(state: State, name: str) -> ProductSums:
    if f"{name}.classes" in state.tensors:
        return ProductSums.read(state.tensors, name)
    return ProductSums.zero(state.tensors[f"{_TOTAL}.sum"].shape[1])


def _solved(h: AnalyticHparams, state: State) -> State:
    """Return the state with the classifier of its sums."""
    total = _read(state, _TOTAL)
    found = solve(h, total + _read(state, _PSEUDO) if h.counts_unlabelled else total)
    rows: dict[str, Array] = {
        "classes": found.classes,
        "weight": found.weight.astype(np.float32),
        "bias": found.bias.astype(np.float32),
    }
    if h.counts_unlabelled:
        rows |= centres_of(h, total).tensors()
    return State({**state.tensors, **rows}, state.meta)


def _sent(ctx: Context, updates: Updates) -> Iterator[ProductSums]:
    """Yield the sums of the updates, those of capped clients lowered."""
    samples = np.asarray(updates.samples, dtype=np.float64)
    factors = np.ones(len(samples))
    if ctx.hparams.weights == "capped":
        factors = allowed_counts(updates.samples, ctx.max_weight_share) / samples
    for update, factor in zip(updates, factors.tolist(), strict=True):
        sums = read_upload(ctx.hparams, update.payload)
        yield sums if factor == 1 else sums.scaled(factor)
