"""Heads of classifiers: nearest prototypes, their losses, and the row of a lone class.

Yang et al., Convolutional Prototype Network for Open Set Recognition, TPAMI 2020
(distance-based cross-entropy and prototype loss), as PILoRA and PLoRA use them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_protocol.payloads.schema import TensorSpec

Distance = Literal["rms", "sq", "sq_over_d"]

# Below it the square root's slope grows without bound.
_SMALLEST = 1e-12
_SMALLEST_NORM = float(np.finfo(np.float32).tiny)
_LARGEST = TensorSpec.max_abs  # of an entry that may be broadcast


def squared_distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return ``||f - m||^2`` for features (B, d) and prototypes (C, d): (B, C), all >= 0.

    The expanded form needs no (B, C, d) tensor; in float32 it can fall below zero.
    """
    squares = features.square().sum(1, keepdim=True) + prototypes.square().sum(1)  # (B, C)
    return (squares - 2 * features @ prototypes.T).clamp_min(0)


def prototype_distances(features: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """Return the (B, C) distances that a loss uses.

    ``rms``: sqrt(sq / d); ``sq``: squared; ``sq_over_d``: squared, divided by the width d.
    All three have the same nearest prototype.
    """
    d = features.shape[1]
    squared = squared_distances(features, prototypes)  # (B, C)
    if distance == "sq":
        return squared
    if distance == "sq_over_d":
        return squared / d
    return (squared / d).clamp_min(_SMALLEST).sqrt()


def prototype_losses(distances: Tensor, target: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return each image's distance-based cross-entropy and pull term.

    Args:
        distances: (B, C).
        target: (B,) column of each image's own prototype.
        delta: factor of the distances in the softmax.

    Returns:
        ``-log softmax(-delta D)_y`` (B,) and ``D_y`` (B,).
    """
    own = torch.nn.functional.one_hot(target, distances.shape[1]).to(distances.dtype)  # (B, C)
    # A product instead of gather: gather's gradient is not deterministic on GPUs.
    pull = (distances * own).sum(1)  # (B,)
    cross_entropy = torch.logsumexp(-delta * distances, 1) + delta * pull  # (B,)
    return cross_entropy, pull


def mean_row(mean: NDArray[np.floating], past: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return a linear head's row that points to a class mean, as long as past rows are.

    A task of a single class has a cross-entropy of 0, which teaches its row nothing; this row
    replaces it, and competes with past rows on equal terms.

    Args:
        mean: (..., d), one class mean or several.
        past: (C, d), the rows of known past classes.

    Returns:
        (..., d), each of the past rows' mean length, or 1 without any; zero where the mean is zero.
            Shorter where past rows are so long that an entry could not be broadcast.
    """
    length = float(np.linalg.norm(past.astype(np.float64), axis=1).mean()) if len(past) else 1.0
    rows = mean.astype(np.float64)
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    scaled: NDArray[np.float64] = rows * (length / np.maximum(norms, _SMALLEST_NORM))
    largest = np.abs(scaled).max(axis=-1, keepdims=True)
    bounded: NDArray[np.float64] = scaled * np.minimum(
        1.0, _LARGEST / np.maximum(largest, _SMALLEST_NORM)
    )
    return bounded


def draw_linear(
    rng: np.random.Generator, c: int, d: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw a linear head's weight (c, d) and bias (c,) from U(-1/sqrt(d), 1/sqrt(d)).

    These are the start values of torch's Linear.
    """
    bound = 1 / np.sqrt(d)
    weight = rng.uniform(-bound, bound, (c, d)).astype(np.float32)
    return weight, rng.uniform(-bound, bound, c).astype(np.float32)
