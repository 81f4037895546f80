"""Predictors that score images in micro-batches, without a gradient (torch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch


@dataclass(frozen=True)
class Scorer:
    """A composed model (`contract.Predictor`).

    Attributes:
        classes: candidate ids, one per column.
        score: images (b, S, S, 3), uint8 -> scores (b, C).
        micro_batch: largest b; None: all images at once.
    """

    classes: tuple[int, ...]
    score: Callable[[Tensor], Tensor]
    micro_batch: int | None

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self.micro_batch or max(len(images), 1))
            return np.concatenate([to_numpy(self.score(part)) for part in parts])
