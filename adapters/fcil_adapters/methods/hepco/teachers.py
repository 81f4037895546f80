"""Weights of the teachers' predictions for each label, and the labels of latents (torch).

``a_{k,y}``, the weight of teacher k for label y, enters every loss of the server. A
client that never saw y has an untrained row for it and must not pull latents there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.numerics.client_weights import allowed_counts, class_weights

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Head:
    """One or many linear heads over the same C columns, in float64.

    Attributes:
        weight: (..., C, d).
        bias: (..., C).
    """

    weight: Tensor
    bias: Tensor

    def logits(self, z: Tensor) -> Tensor:
        """Apply each head directly to latents (B, d): (..., B, C)."""
        return z @ self.weight.mT + self.bias.unsqueeze(-2)


@dataclass(frozen=True)
class Teachers:
    """The models that one generator learns from.

    Attributes:
        heads: (K, C, d) and (K, C).
        shares: (K, C), a_{k,y}.
        labels: (C,) how often a latent gets each label; sums to 1, 0 without a teacher.
    """

    heads: Head
    shares: Tensor
    labels: Tensor

    def of_labels(self, own: Tensor) -> Tensor:
        """Return a_{k,y_b} for labels as one-hot rows (..., B, C): (..., B, K)."""
        return own @ self.shares.T


def label_shares(
    counts: F64, recent: F64, others: int, h: HepcoHparams, max_share: float = 1.0
) -> tuple[F64, F64]:
    """Return the teachers' weights for the task's classes, and the labels' frequencies.

    Args:
        counts: (K, c), images by client and class in this round.
        recent: (c,), a class's images in the last round in which a client had it, before
            this one; 0: no client ever had it.
        others: classes of the run beside the task's, each of which adds 1 to the one total
            of ``weights = "repo"``.
        h: ``weights`` and ``labels``.
        max_share: largest weight of one client for a label that others have as well.

    Returns:
        Shares (K + 1, c); the last row is the server as the round began, the sole teacher of
        classes that no client has in this round but one had before. Frequencies (c,); a
        class that no teacher shapes has none.
    """
    totals = counts.sum(0)  # (c,)
    kept = np.where(totals > 0, 0.0, recent)
    images = np.vstack([counts, kept])  # (K + 1, c)
    has_teacher = (images > 0).any(0)
    if h.weights == "none":
        shares = np.ones_like(images)
        shares[-1] = kept > 0
        shares[:-1, totals <= 0] = 0
    elif h.weights == "repo":
        capped = class_weights(images, max_share) * images.sum(0)
        shares = capped / (np.maximum(totals, 1).sum() + others)
    else:
        shares = class_weights(images, max_share)
    wanted = images.sum(0) if h.labels == "counts" else has_teacher.astype(np.float64)
    return shares, wanted / wanted.sum()


def capped_counts(counts: NDArray[Any], max_share: float) -> F64:
    """Lower each client's counts (K, c) so that no client has more than its share of all.

    At 1 the counts stay as they are; below, a client that inflates its counts cannot fill
    the latents with its classes, now or when they are past ones.
    """
    samples = counts.sum(1)  # (K,)
    factors = allowed_counts(samples.tolist(), max_share) / samples
    scaled: F64 = counts * factors[:, None]
    return scaled


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels (...) as float64 rows (..., C)."""
    return torch.nn.functional.one_hot(labels, classes).double()
