"""Averages over clients on the server's device: plain, or robust against single clients (torch).

The coordinate-wise rules are those of Yin et al., Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates, ICML 2018, https://arxiv.org/abs/1803.01498, with weights; clipped steps
are those of Sun et al., Can You Really Backdoor Federated Learning?, 2019,
https://arxiv.org/abs/1911.07963, with a bound that the round itself sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.contract import Context, Updates
from fcil_adapters.numerics.client_weights import class_weights
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_protocol.payloads.payload import Array

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# Bytes of all clients that the coordinate-wise rules hold at once, unless one tensor alone is
# larger, and the entries that they sort at once: sorting takes some 40 bytes for each.
_STACK_BYTES = 64 << 20
_SORTED_NUMBERS = 1 << 20
# Cumulated weights nearer to each other than this are equal; sums of K weights are not exact.
_EQUAL = 1e-9


def average(
    ctx: Context,
    updates: Updates,
    names: Iterable[str],
    weights: F64,
    start: Mapping[str, Array],
) -> dict[str, F32]:
    """Average tensors of all clients by the rule of ``ctx.averaging``.

    ``mean`` and ``clip`` stream: memory does not depend on K. ``trimmed_mean`` and ``median`` hold
    a tensor of all clients at once, and open the updates once for several tensors. A single
    client's values come out unchanged under any rule.

    Args:
        ctx: rule and device.
        updates: K of them, opened one at a time, more than once.
        names: of the tensors.
        weights: (K,), they sum to 1.
        start: the same tensors as the round began; ``clip`` measures steps from there.

    Returns:
        name -> float32 array of the tensor's shape; computed in float64 (docs/methods/README.md,
            "Arithmetic").
    """
    wanted = tuple(names)
    match ctx.averaging.rule:
        case "mean":
            return weighted_mean(updates, wanted, weights, ctx.device)
        case "clip":
            return _clipped(ctx, updates, wanted, weights, start)
        case _:
            return _by_entry(ctx, updates, wanted, weights, start)


def weighted_mean(
    updates: Updates, names: Iterable[str], weights: F64, device: str
) -> dict[str, F32]:
    """Stream ``sum_k w_k X_k`` over the updates; memory does not depend on their number.

    The same as `client_weights.weighted_mean`, which needs no torch.

    Args:
        updates: opened one at a time.
        names: of the tensors.
        weights: (K,).
        device: holds the sums, in float64.

    Returns:
        name -> float32 array of the tensor's shape.
    """
    wanted = tuple(names)
    sums: dict[str, Tensor] = {}
    for weight, update in zip(weights.tolist(), updates, strict=True):
        for name in wanted:
            term = to_torch(update.payload.tensors[name], device)
            if name not in sums:
                sums[name] = torch.zeros(term.shape, dtype=torch.float64, device=device)
            sums[name].add_(term, alpha=weight)
    return {name: to_numpy(total) for name, total in sums.items()}


def _clipped(
    ctx: Context,
    updates: Updates,
    names: Sequence[str],
    weights: F64,
    start: Mapping[str, Array],
) -> dict[str, F32]:
    """Stream ``start + sum_k w_k min(1, clip m / |s_k|) s_k``, ``s_k = X_k - start``.

    ``m`` is the median of the |s_k|, for each tensor by itself.
    """
    origin = {name: to_torch(start[name], ctx.device, torch.float64) for name in names}
    lengths = np.array(
        [
            [float((to_torch(u.payload.tensors[n], ctx.device) - origin[n]).norm()) for n in names]
            for u in updates
        ]
    )  # (K, tensors)
    bounds = ctx.averaging.clip * np.median(lengths, axis=0)
    scales = weights[:, None] * np.minimum(1.0, bounds / np.maximum(lengths, np.finfo(float).tiny))
    steps = {name: torch.zeros_like(value) for name, value in origin.items()}
    for row, update in zip(scales.tolist(), updates, strict=True):
        for scale, name in zip(row, names, strict=True):
            step = to_torch(update.payload.tensors[name], ctx.device) - origin[name]
            steps[name].add_(step, alpha=scale)
    return {name: to_numpy(origin[name] + steps[name]) for name in names}


def _by_entry(
    ctx: Context,
    updates: Updates,
    names: Sequence[str],
    weights: F64,
    start: Mapping[str, Array],
) -> dict[str, F32]:
    """Trim or take the median of every entry by itself; several tensors per pass over clients."""
    rule = ctx.averaging
    capped = class_weights(weights[:, None], rule.trim)[:, 0]  # (K,)
    trim = rule.trim if rule.rule == "trimmed_mean" else None
    sizes = {name: len(updates) * np.asarray(start[name]).size * 4 for name in names}
    found: dict[str, F32] = {}
    for group in _groups(sizes):
        stacks: dict[str, list[Array]] = {name: [] for name in group}
        for update in updates:
            for name in group:
                # A copy: a view would keep the client's entire update in memory.
                stacks[name].append(np.array(update.payload.tensors[name], dtype=np.float32))
        for name in group:
            values = torch.from_numpy(np.stack(stacks.pop(name)))  # (K, ...)
            found[name] = to_numpy(combine_entries(values.to(ctx.device), capped, trim))
    return found


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Cut names into groups of at most `_STACK_BYTES`; a larger tensor is a group of its own."""
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + size > _STACK_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def combine_entries(values: Tensor, weights: F64, trim: float | None) -> Tensor:
    """Return the weighted trimmed mean or the weighted median of every entry.

    The K values of an entry are sorted and laid side by side, each as wide as its client's weight,
    on a line of length 1. The trimmed mean is the mean of the part between ``trim`` and ``1 -
    trim``: a client at the edge counts with the part of its weight inside. The median is the value
    at 1/2; where two values meet there, their mean.

    Args:
        values: (K, ...).
        weights: (K,), they sum to 1.
        trim: share cut off at each end, in [0, 0.5); None: the median.

    Returns:
        (...) in float64.
    """
    flat = values.flatten(1).T  # (P, K)
    width = torch.from_numpy(weights).to(values.device)
    chunk = max(1, _SORTED_NUMBERS // len(weights))
    parts = [_combine_sorted(some, width, trim) for some in torch.split(flat, chunk)]
    return torch.cat(parts).reshape(values.shape[1:])


def _combine_sorted(values: Tensor, weights: Tensor, trim: float | None) -> Tensor:
    """Combine rows (P, K): (P,)."""
    ordered, index = values.contiguous().sort(dim=1)
    own = weights[index]  # (P, K)
    ends = own.cumsum(1)
    if trim is None:
        low = (ends < 0.5 - _EQUAL).sum(1, keepdim=True)
        high = (ends <= 0.5 + _EQUAL).sum(1, keepdim=True)
        last = values.shape[1] - 1
        pair = torch.cat([low, high], 1).clamp_max(last)
        return ordered.double().gather(1, pair).mean(1)
    inside = ends.clamp_max(1 - trim) - (ends - own).clamp_min(trim)
    kept = inside.clamp_min(0)
    return (kept * ordered.double()).sum(1) / kept.sum(1)
