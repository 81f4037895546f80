"""EWC's server half: averages, and the Fisher information of all tasks so far (torch)."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Context, Part, Payload, State, Updates
from fcil_adapters.methods.ewc.options import EwcHparams
from fcil_adapters.methods.ewc.parts import IMPORTANCE, LARGEST, fisher_name
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.lora.halves import LoraAggregator
from fcil_adapters.toolkit.lora.manifest import trained_names
from fcil_adapters.toolkit.lora.server import client_weights


class Aggregator(LoraAggregator):
    """State of `lora.server`, with ``fisher...``, and ``new.fisher...`` until a task opens."""

    def open_task(self, ctx: Context, state: State) -> State:
        """Add the last task's F to the others: ``F <- gamma F + F_new``.

        A task whose F no client measured, or that had one column and so no gradient, adds no
        importance, and takes nothing from that of earlier tasks. The sum stays within the bounds of
        a broadcast, independent of the uploads.
        """
        h: EwcHparams = ctx.hparams
        tensors = {n: a for n, a in state.tensors.items() if not n.startswith("new.")}
        if current_task(state) >= 0:
            for name in _names(h):
                before = (
                    state.f32(name) if name in tensors else np.zeros_like(state.f32(_lora(name)))
                )
                tensors[name] = before
                if f"new.{name}" in state.tensors:
                    fresh = state.f32(f"new.{name}").astype(np.float64)
                    total = np.minimum(h.gamma * before + fresh, LARGEST)
                    tensors[name] = total.astype(np.float32)
        return super().open_task(ctx, State(tensors, state.meta))

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average LoRA and head, or the clients' F."""
        h: EwcHparams = ctx.hparams
        if ctx.kind != "finish":
            return super().aggregate(ctx, state, updates)
        if h.single_column(ctx.task):
            return state
        names = _names(h)
        zero = {name: np.zeros(state.tensors[_lora(name)].shape, np.float32) for name in names}
        mean = average(ctx, updates, names, client_weights(ctx, updates), zero)
        return State({**state.tensors, **{f"new.{n}": a for n, a in mean.items()}}, state.meta)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the parts of `lora.server`, and F once a task is finished."""
        parts = super().broadcast(ctx, state)
        if current_task(state) < 1:
            return parts
        fisher = {name: state.tensors[name] for name in _names(ctx.hparams)}
        return (*parts, Part(IMPORTANCE, Payload(fisher)))


def _names(h: EwcHparams) -> tuple[str, ...]:
    return tuple(fisher_name(name) for name in trained_names(h))


def _lora(fisher: str) -> str:
    return f"lora.{fisher.removeprefix('fisher.')}"
