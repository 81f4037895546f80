"""Sums and weights over clients, in float64, independent of the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Updates
from fcil_protocol.errors import DataError

F64 = NDArray[np.float64]


def sample_weights(samples: Sequence[int], max_share: float = 1.0) -> F64:
    """Return FedAvg weights w_k = n_k / N, none above ``max(max_share, 1/K)``, summing to 1.

    A capped client's excess is shared among the others in proportion to their samples; inflating
    one's sample count is the cheapest attack, and this bounds it (docs/lying-clients.md, "Four
    limits").

    Raises:
        DataError: no client has a sample.
    """
    counts = np.asarray(samples, dtype=np.float64)
    if counts.size == 0 or counts.sum() <= 0:
        raise DataError("weights need at least one client with a sample.")
    return class_weights(counts[:, None], max_share)[:, 0]


def allowed_counts(samples: Sequence[int], max_share: float = 1.0) -> F64:
    """Return the n_k that each client may claim: their shares are `sample_weights`.

    Counts below the cap stay; those above are lowered, and the sum with them. So a client that
    inflates its count makes neither itself nor its round and task outweigh the others.

    Raises:
        DataError: no client has a sample.
    """
    weights = sample_weights(samples, max_share)
    counts = np.asarray(samples, dtype=np.float64)
    own = weights > 0
    total = float((counts[own] / weights[own]).min())
    allowed: F64 = weights * total
    return allowed


def class_weights(counts: NDArray[Any], max_share: float = 1.0) -> F64:
    """Return each client's weight in each class: its share of the class's images, capped.

    Every column equals `sample_weights` of it; all columns are computed at once.

    Args:
        counts: (K, C), images of each client and class, >= 0.
        max_share: largest weight of one client in a class that others have as well.

    Returns:
        (K, C); a column sums to 1, or is zero for a class without images.
    """
    images = np.asarray(counts, dtype=np.float64)
    owners = np.maximum((images > 0).sum(0), 1)  # (C,)
    cap = np.maximum(max_share, 1.0 / owners)  # (C,)
    weights = _shares(images)
    capped = np.zeros(images.shape, dtype=bool)
    while (weights > cap * (1 + 1e-12)).any():
        capped |= weights > cap
        # With every owner at the cap, cap * owners = 1 and nothing is left to share.
        rest = 1.0 - cap * capped.sum(0)  # (C,)
        weights = np.where(capped, cap, _shares(np.where(capped, 0.0, images)) * rest)
    return weights


def _shares(images: F64) -> F64:
    """Divide each column (K, C) by its sum; a column of zeros stays."""
    totals = images.sum(0)
    shares: F64 = images / np.where(totals > 0, totals, 1.0)
    return shares


def weighted_mean(
    updates: Updates, names: Iterable[str], weights: F64
) -> dict[str, NDArray[np.float32]]:
    """Stream sum_k w_k X_k over the updates; one update in memory at a time.

    For methods without torch; `averaging.weighted_mean` does the same on the server's device.

    Returns:
        name -> float32 array of the tensor's shape; accumulated in float64
        (docs/methods/README.md, "Arithmetic").
    """
    wanted = tuple(names)
    sums: dict[str, F64] = {}
    for weight, update in zip(weights, updates, strict=True):
        for name in wanted:
            term = weight * np.asarray(update.payload.tensors[name], dtype=np.float64)
            sums[name] = sums[name] + term if name in sums else term
    return {name: total.astype(np.float32) for name, total in sums.items()}
