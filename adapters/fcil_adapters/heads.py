"""Nearest-prototype classification: distances, logits and the distance-based losses.

Yang et al., Convolutional Prototype Network for Open Set Recognition, TPAMI 2020
(distance-based cross-entropy and prototype loss), as PILoRA and PLoRA use them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Distance = Literal["rms", "sq", "sq_over_d"]

# Below it the square root's slope grows without bound.
_SMALLEST = 1e-12


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
