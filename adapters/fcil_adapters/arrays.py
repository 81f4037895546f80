"""Sums and weights over clients, in float64, independent of the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Updates
from fcil_protocol.errors import DataError

F64 = NDArray[np.float64]


def sample_weights(samples: Sequence[int], max_share: float = 1.0) -> F64:
    """Return FedAvg weights w_k = n_k / N, none above ``max(max_share, 1/K)``, summing to 1.

    What a capped client loses is shared among the others in proportion to their samples;
    inflating one's sample count is the cheapest attack, and this bounds it (DESIGN.md 11).

    Raises:
        DataError: no client has a sample.
    """
    counts = np.asarray(samples, dtype=np.float64)
    if counts.size == 0 or counts.sum() <= 0:
        raise DataError("weights need at least one client with a sample.")
    cap = max(max_share, 1.0 / counts.size)
    weights: F64 = counts / counts.sum()
    capped = np.zeros(counts.shape, dtype=bool)
    while (weights > cap * (1 + 1e-12)).any():
        capped |= weights > cap
        free = counts[~capped].sum()
        rest = 1.0 - cap * capped.sum()
        # With every client at the cap, cap * K = 1 and nothing is left to share.
        share = counts / free * rest if free > 0 else np.zeros_like(counts)
        weights = np.where(capped, cap, share)
    return weights


def weighted_mean(
    updates: Updates, names: Iterable[str], weights: F64
) -> dict[str, NDArray[np.float32]]:
    """Stream sum_k w_k X_k over the updates; one update in memory at a time.

    Returns:
        name -> float32 array of the tensor's shape; accumulated in float64 (METHODS.md G3).
    """
    wanted = tuple(names)
    sums: dict[str, F64] = {}
    for weight, update in zip(weights, updates, strict=True):
        for name in wanted:
            term = weight * np.asarray(update.payload.tensors[name], dtype=np.float64)
            sums[name] = sums[name] + term if name in sums else term
    return {name: total.astype(np.float32) for name, total in sums.items()}
