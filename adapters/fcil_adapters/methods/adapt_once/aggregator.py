"""adapt_once's server half: average in the first task, then add sums up and solve (torch)."""

from __future__ import annotations

from dataclasses import replace

from fcil_adapters.contract import Array, Context, Part, Payload, State, Updates
from fcil_adapters.methods.adapt_once.options import AdaptOnceHparams
from fcil_adapters.methods.adapt_once.parts import (
    ADAPTER,
    HEAD,
    PART_DIGEST,
    TRAIN,
    UPLOAD_DIGEST,
    digest_bytes,
    digest_text,
)
from fcil_adapters.toolkit.closed_form.aggregator import SumsAggregator
from fcil_adapters.toolkit.lora.manifest import trained_names
from fcil_adapters.toolkit.lora.merging import merged_digest, merged_weights
from fcil_adapters.toolkit.lora.server import (
    average_round,
    first_state,
    open_task,
    rows_of,
    start_of,
)
from fcil_adapters.toolkit.lora.tensors import lora_of
from fcil_protocol.errors import DataError

_ROWS = "task."  # names of the head's tensors begin so (`lora.server`)


class Aggregator:
    """The state: that of `closed_form.aggregator`, and what the first task trains.

    ``lora.*`` and ``digest`` (32,), of the backbone with the LoRA merged, which no round changes
    after the last one of training; ``task.0.*``, the head's rows, until the task is over.
    """

    def init(self, ctx: Context) -> State:
        """Draw the seed of the projection; no class is known yet."""
        state = SumsAggregator().init(ctx)
        return State(state.tensors, first_state().meta) if ctx.hparams.adapts else state

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the LoRA and its head for the first task."""
        if not ctx.hparams.adapts:
            return state
        if ctx.task.index > 0:
            return _without_head(state)
        return _with_digest(ctx, open_task(_adapting(ctx), state))

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the LoRA and rows that clients train."""
        return start_of(_adapting(ctx), state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average a training round, or add up sums.

        Raises:
            DataError: a sum was computed with other weights than the frozen ones; or the average is
                not finite, and the state stays without it.
        """
        h: AdaptOnceHparams = ctx.hparams
        if not h.adapts:
            return SumsAggregator().aggregate(ctx, state, updates)
        if ctx.kind == TRAIN:
            return _with_digest(ctx, average_round(_adapting(ctx), state, updates))
        _check_digests(state, updates)
        return SumsAggregator().aggregate(ctx, state, updates)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the classifier and the seed, the LoRA, and in the first task its head."""
        parts = SumsAggregator().broadcast(ctx, state)
        if PART_DIGEST not in state.tensors:
            return parts
        h: AdaptOnceHparams = ctx.hparams
        lora: dict[str, Array] = {name: state.tensors[name] for name in trained_names(h.adapt)}
        lora[PART_DIGEST] = state.tensors[PART_DIGEST]
        parts = (*parts, Part(ADAPTER, Payload(lora)))
        if not any(name.startswith(_ROWS) for name in state.tensors):
            return parts
        return (*parts, Part(HEAD, Payload(rows_of(h.adapt, state, 0).named())))


def _adapting(ctx: Context) -> Context:
    """Return the context of the shared code of LoRA."""
    return replace(ctx, hparams=ctx.hparams.adapt)


def _with_digest(ctx: Context, state: State) -> State:
    """Return the state with the digest of the backbone that its LoRA makes."""
    weights = merged_weights(ctx.backbone, ctx.hparams.adapt, lora_of(state))
    digest = digest_bytes(merged_digest(ctx.backbone.info, weights))
    return State({**state.tensors, PART_DIGEST: digest}, state.meta)


def _without_head(state: State) -> State:
    kept = {n: array for n, array in state.tensors.items() if not n.startswith(_ROWS)}
    return State(kept, state.meta)


def _check_digests(state: State, updates: Updates) -> None:
    ours = digest_text(state, PART_DIGEST)
    for update in updates:
        theirs = digest_text(update.payload, UPLOAD_DIGEST)
        if theirs != ours:
            raise DataError(
                f"its sums are of features of a backbone with digest {theirs[:12]}, and the "
                f"frozen one has {ours[:12]}.",
                action="Use the same weights file and the same version of fcil on every device.",
            )
