"""How PILoRA's broadcast becomes a nearest-prototype classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.heads import squared_distances
from fcil_adapters.methods.pilora.composition import inference_view
from fcil_adapters.methods.pilora.parts import read_parts
from fcil_protocol.payload import Payload


class NearestPrototype:
    """Scores are the negative squared distances to the seen classes' prototypes."""

    def __init__(
        self,
        backbone: Backbone,
        view: Any,
        classes: tuple[int, ...],
        prototypes: Tensor,
        micro_batch: int | None,
    ) -> None:
        self.classes = classes
        self._backbone = backbone
        self._view = view
        self._prototypes = prototypes  # (C, d)
        self._micro_batch = micro_batch

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self._micro_batch or max(len(images), 1))
            return np.concatenate([self._score(part) for part in parts])

    def _score(self, pixels: Tensor) -> NDArray[np.float32]:
        features = cls_features(self._view, self._backbone.normalise(pixels))  # (b, d)
        return to_numpy(-squared_distances(features, self._prototypes))


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge the tasks' LoRAs into a view; candidates are the classes that anybody had."""
        tasks = read_parts(broadcast)
        view = inference_view(backbone, ctx.hparams, tasks)
        known = [task.known for task in tasks]
        classes = tuple(int(c) for ids, _ in known for c in ids)
        prototypes = to_torch(np.concatenate([rows for _, rows in known]), backbone.device)
        return NearestPrototype(backbone, view, classes, prototypes, ctx.micro_batch)
