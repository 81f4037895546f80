"""Nearest-prototype prediction on an adapted view of the backbone (torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.heads import squared_distances


class NearestPrototype:
    """Scores are the negative squared distances of features to the classes' prototypes.

    Attributes:
        classes: candidate ids, in the order of the prototypes.
    """

    def __init__(
        self,
        backbone: Backbone,
        view: Any,
        classes: tuple[int, ...],
        prototypes: Tensor,  # (C, d)
        micro_batch: int | None,
    ) -> None:
        self.classes = classes
        self._backbone = backbone
        self._view = view
        self._prototypes = prototypes
        self._micro_batch = micro_batch

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self._micro_batch or max(len(images), 1))
            return np.concatenate([self._score(part) for part in parts])

    def _score(self, pixels: Tensor) -> NDArray[np.float32]:
        features = cls_features(self._view, self._backbone.normalise(pixels))  # (b, d)
        return to_numpy(-squared_distances(features, self._prototypes))
