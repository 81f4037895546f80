"""What ablations need beside the methods' own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from simulation import Round

from fcil_adapters.arrays import sample_weights
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.lora_head import places
from fcil_adapters.methods.fed_talora.history import total
from fcil_adapters.methods.fed_talora.parts import Received, read_parts
from fcil_adapters.methods.hgp import aggregator as hgp


class Identity:
    """Fed-TaLoRA: how far the broadcast weights are from the mean of the clients' weights.

    With the residual, W + W_res + B A equals sum_k w_k (W_k + B_k A_k)
    (docs/methods/fed_talora.md, "Server: the residual").

    Attributes:
        difference: largest absolute difference of an entry over all matrices and rounds.
        change: largest absolute entry of the mean of what is added to the frozen weights.
    """

    def __init__(self) -> None:
        self.difference = 0.0
        self.change = 0.0

    def __call__(self, seen: Round) -> None:
        h = seen.ctx.hparams
        before, after = read_parts(h, seen.before), read_parts(h, seen.after)
        weights = sample_weights(seen.updates.samples, seen.ctx.max_weight_share)  # (K,)
        for place in places(h):
            start = _sum(before, place)  # what all clients trained on, (out, in)
            mean = start
            for weight, update in zip(weights, seen.updates, strict=True):
                mean = mean + float(weight) * _product(update.payload.tensors, before, place)
            sent = _sum(after, place) + _product({}, after, place)
            self.difference = max(self.difference, float((sent - mean).abs().max()))
            self.change = max(self.change, float(mean.abs().max()))

    def numbers(self) -> dict[str, float]:
        """Return both attributes for a table."""
        return {"difference": self.difference, "change": self.change}


def _sum(received: Received, place: str) -> Any:
    dense = total(place, received.base, received.residuals, "cpu")
    return torch.zeros((), dtype=torch.float64) if dense is None else dense


def _product(sent: Mapping[str, Any], received: Received, place: str) -> Any:
    """Return B A in float64 of an update; factors that it lacks are those of the broadcast."""
    known = {**received.lora, **sent}
    A, B = (to_torch(known[f"lora.{place}.{m}"], dtype=torch.float64) for m in "AB")
    return B @ A


class RebalanceOld:
    """HGP's server that rebalances the rows of past tasks alone, on samples of them (CR_old).

    The method itself has no such option. Columns of the cross-entropy are the past classes,
    as those of ``rebalance = "current"`` are the current ones.
    """

    def __init__(self) -> None:
        self._inner = hgp.Aggregator()

    def init(self, ctx: Context) -> State:
        return self._inner.init(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        return self._inner.open_task(ctx, state)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        return self._inner.broadcast(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Aggregate without rebalancing, then rebalance as if this task had no Gaussians."""
        averaged = self._inner.aggregate(_with(ctx, "off"), state, updates)
        if not ctx.task.past:
            return averaged
        head = averaged.f32("head.weight"), averaged.f32("head.bias")
        weight, bias = hgp._rebalanced(_with(ctx, "seen"), averaged, head, [])  # noqa: SLF001
        return State({**averaged.tensors, "head.weight": weight, "head.bias": bias}, averaged.meta)


def _with(ctx: Context, rebalance: str) -> Context:
    return replace(ctx, hparams=ctx.hparams.model_copy(update={"rebalance": rebalance}))
