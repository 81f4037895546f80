"""Fed-TaLoRA's server half: average LoRA and head, and keep what the averages lose (torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Part, State, Update, Updates
from fcil_adapters.methods.fed_talora.history import extended, position, residual_parts
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.residuals import Residual
from fcil_adapters.toolkit.lora.manifest import places, trained_names
from fcil_adapters.toolkit.lora.server import (
    LoraReports,
    average_round,
    client_weights,
    first_state,
    open_task,
    parts_of,
)
from fcil_protocol.ids import ClientId


class Aggregator:
    """The state of `lora.server`, with the residuals (`history`)."""

    def init(self, ctx: Context) -> State:
        """Return the empty state before the first task."""
        del ctx
        return first_state(version=0, base=0)

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the task's head rows, and at first the LoRA; the rest of the state stays."""
        return open_task(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average LoRA and head; add the mean of products less that product (Eq. 4, 5, 9).

        Updates that were trained on another base are left out; if no other remains, nothing
        changes.
        """
        h: FedTaloraHparams = ctx.hparams
        told = LoraReports.of(updates, len(ctx.task.classes))
        version = position(state)[0]
        fresh = np.array([meta["version"] == version for meta in told.metas])  # (K,)
        if not fresh.any():
            return state
        if not fresh.all():
            updates, told = _Fresh(updates, fresh), told.chosen(fresh)
        after = average_round(ctx, state, updates, told)
        if h.single_column(ctx.task) or not h.corrects or len(updates) == 1:
            return after
        lora = {name: after.tensors[name] for name in trained_names(h)}
        weights = client_weights(ctx, updates)
        residual = Residual(updates, weights, lora, places(h), ctx.device)
        return extended(after, residual, h, ctx.backbone_info, ctx.device)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts and the residuals."""
        version, base = position(state)
        meta = {"version": version, "base": base}
        return (*parts_of(ctx, state, meta), *residual_parts(state))


@dataclass(frozen=True)
class _Fresh:
    """The updates that were trained on the state's base (`contract.Updates`)."""

    updates: Updates
    fresh: NDArray[np.bool_]

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(c for c, ok in zip(self.updates.clients, self.fresh, strict=True) if ok)

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(n for n, ok in zip(self.updates.samples, self.fresh, strict=True) if ok)

    def __len__(self) -> int:
        return int(self.fresh.sum())

    def __iter__(self) -> Iterator[Update]:
        return (u for u, ok in zip(self.updates, self.fresh, strict=True) if ok)
