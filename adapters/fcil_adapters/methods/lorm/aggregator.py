"""LoRM's server half: merge factors and head in closed form, keep each task's LoRA (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fcil_adapters.contract import Array, Context, Part, Payload, State, Updates
from fcil_adapters.methods.lorm.merging import RegMean, unpack_triangle
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.methods.lorm.parts import (
    IMAGES,
    TaskLora,
    gram_part,
    lora_part,
    root_name,
    root_names,
)
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import allowed_counts
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.lora.halves import LoraAggregator
from fcil_adapters.toolkit.lora.manifest import factor_names
from fcil_adapters.toolkit.lora.server import F64, average_round, client_weights
from fcil_protocol.errors import DataError


class Aggregator(LoraAggregator):
    """State of `lora.server`, with ``past.<t>.lora...`` and ``gram.<t>...`` of the tasks."""

    def open_task(self, ctx: Context, state: State) -> State:
        """Keep the last task's LoRA, if it trained one, and draw another."""
        last = current_task(state)
        if last >= 0:
            lora = {name: state.f32(name) for name in factor_names(ctx.hparams)}
            if TaskLora(lora).trained:
                kept = {f"past.{last}.{name}": array for name, array in lora.items()}
                state = State({**state.tensors, **kept}, state.meta)
        return super().open_task(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Merge the round's factor and the head, or average the squares of the inputs."""
        if ctx.kind == "finish":
            return _described(ctx, state, updates)
        return average_round(ctx, state, updates, combine=merge)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts, and the LoRA and the squared inputs of each task."""
        tasks = range(current_task(state) + 1)
        loras = [(lora_part(t), _named(state, f"past.{t}.")) for t in tasks]
        grams = [(gram_part(t), _named(state, f"gram.{t}.")) for t in tasks]
        more = (Part(name, Payload(found)) for name, found in (*loras, *grams) if found)
        return (*super().broadcast(ctx, state), *more)


def merge(
    ctx: Context,
    updates: Updates,
    names: Sequence[str],
    weights: F64,
    start: Mapping[str, Array],
) -> dict[str, F32]:
    """Merge weights by RegMean, and the biases by their mean (`averaging.average`).

    The Gram matrices are means over images, and count with the clients' weights.

    Raises:
        DataError: an update has the other factor than that of its round.
    """
    h: LormHparams = ctx.hparams
    for update in updates:
        if not set(names) <= set(update.payload.tensors):
            raise DataError(
                f"the update of {update.client} lacks the {h.factors_of(ctx.round)} that round "
                f"{ctx.round} of a task trains."
            )
    mean: dict[str, F32] = average(ctx, updates, names, weights, start)
    sums = {
        name: RegMean.around(to_torch(mean[name], ctx.device), diagonal=name.endswith(".A"))
        for name in names
        if name != "head.bias"
    }
    pulls = capped_pulls(updates, [root_name(name) for name in sums], weights, ctx.max_weight_share)
    for k, update in enumerate(updates):
        for name, total in sums.items():
            root = to_torch(update.payload.f32(root_name(name)), ctx.device)
            if total.gram.ndim == 2:
                root = unpack_triangle(root, len(total.gram))
            pull = float(pulls[root_name(name)][k])
            total.add(pull, to_torch(update.payload.f32(name), ctx.device), root)
    return {**mean, **{name: to_numpy(total.merged(h.eps)) for name, total in sums.items()}}


def capped_pulls(
    updates: Updates, names: Sequence[str], weights: F64, max_share: float
) -> dict[str, F64]:
    """Return the weights (K,) of the clients' Gram matrices at each place.

    A client pulls a merge by ``w_k tr(G_k)``, and chooses its own ``G_k``. So the weight of one
    whose inputs look larger than everybody's is lowered until its pull has the largest share.

    Args:
        updates: of K clients.
        names: of the roots.
        weights: w_k, (K,).
        max_share: largest share of one client in a place's pulls.
    """
    sizes = {name: np.zeros(len(weights)) for name in names}
    for k, update in enumerate(updates):
        for name in names:
            sizes[name][k] = np.square(update.payload.f32(name), dtype=np.float64).sum()
    pulls = {}
    for name, size in sizes.items():
        claimed = weights * size
        allowed = allowed_counts(claimed.tolist(), max_share) if claimed.any() else claimed
        pulls[name] = weights * np.divide(
            allowed, claimed, where=claimed > 0, out=np.ones_like(claimed)
        )
    return pulls


def _described(ctx: Context, state: State, updates: Updates) -> State:
    """Return the state with the mean squares of the task's inputs; without any it stays."""
    h: LormHparams = ctx.hparams
    names = root_names(h, "A")
    squares: dict[str, F64] = {}
    pulls = capped_pulls(updates, names, client_weights(ctx, updates), ctx.max_weight_share)
    for k, update in enumerate(updates):
        for name in names:
            term = pulls[name][k] * np.square(update.payload.f32(name), dtype=np.float64)
            squares[name] = squares[name] + term if name in squares else term
    if h.single_column(ctx.task) or not any(total.any() for total in squares.values()):
        return state
    images = round(float(allowed_counts(updates.samples, ctx.max_weight_share).sum()))
    found: dict[str, Array] = {n: np.sqrt(s).astype(np.float32) for n, s in squares.items()}
    found[IMAGES] = np.array([max(images, 1)], dtype=np.int64)
    named = {f"gram.{ctx.task.index}.{name}": array for name, array in found.items()}
    return State({**state.tensors, **named}, state.meta)


def _named(state: State, prefix: str) -> dict[str, Array]:
    return {n.removeprefix(prefix): a for n, a in state.tensors.items() if n.startswith(prefix)}
