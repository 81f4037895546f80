"""Class means and their exact merge, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.numerics.client_weights import class_weights

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def class_positions(labels: NDArray[np.int64], classes: Sequence[int]) -> I64:
    """Return the position of each label in ``classes``: (N,) int64.

    Raises:
        KeyError: a label is none of the classes (a fault of the caller's dataset).
    """
    position = {c: i for i, c in enumerate(classes)}
    return np.array([position[int(c)] for c in labels], dtype=np.int64)


def class_sums(
    features: NDArray[Any], labels: NDArray[np.int64], classes: Sequence[int]
) -> tuple[F64, I64]:
    """Sum features by class.

    Args:
        features: (N, d).
        labels: (N,), each one of ``classes``.
        classes: the C class ids, in the order of the result's rows.

    Returns:
        Sums (C, d) and counts (C,); they add up over batches, clients and rounds.
    """
    sums = np.zeros((len(classes), features.shape[1]), dtype=np.float64)  # (C, d)
    counts = np.zeros(len(classes), dtype=np.int64)  # (C,)
    rows = class_positions(labels, classes)
    np.add.at(sums, rows, features.astype(np.float64))
    np.add.at(counts, rows, 1)
    return sums, counts


def class_means(sums: F64, counts: I64) -> F64:
    """Return the means (C, d); the row of a class without images is zero."""
    return sums / np.maximum(counts, 1)[:, None]


def merge_means(means: NDArray[Any], counts: I64, max_share: float = 1.0) -> tuple[F64, I64]:
    """Merge the clients' class means into the means over all their images.

    Args:
        means: (K, C, d); the row of a client without images of a class is ignored.
        counts: (K, C).
        max_share: largest weight of one client in a class that others have as well
            (`client_weights.class_weights`); at 1 the result is the exact mean.

    Returns:
        Means (C, d), zero for a class without images, and total counts (C,).
    """
    weights = class_weights(counts, max_share)  # (K, C)
    owned = np.where((counts > 0)[:, :, None], means, 0)  # (K, C, d)
    merged: F64 = np.einsum("kc,kcd->cd", weights, owned)
    return merged, counts.sum(axis=0, dtype=np.int64)
