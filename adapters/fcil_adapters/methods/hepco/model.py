"""How HePCo's broadcast becomes a classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.hepco.parts import read_parts
from fcil_adapters.methods.hepco.prompting import Pools, PromptedModel
from fcil_adapters.prompts import query_features
from fcil_protocol.payload import Payload


class PromptedClassifier:
    """Two passes per image: the frozen feature chooses the prompts, the prompted one is scored."""

    def __init__(
        self,
        model: PromptedModel,
        pools: Pools,
        head: tuple[Tensor, Tensor],
        classes: tuple[int, ...],
        micro_batch: int | None,
    ) -> None:
        self.classes = classes
        self._model = model
        self._pools = pools
        self._weight, self._bias = head  # (C, d), (C,)
        self._micro_batch = micro_batch

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self._micro_batch or max(len(images), 1))
            return np.concatenate([self._score(part) for part in parts])

    def _score(self, pixels: Tensor) -> NDArray[np.float32]:
        queries = query_features(self._model.backbone, pixels)
        features = self._model.features(pixels, queries, self._pools)  # (b, d)
        return to_numpy(functional.linear(features, self._weight, self._bias))


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Attach the pools to a view; candidates are the classes that anybody had."""
        got = read_parts(broadcast)
        device = backbone.device
        return PromptedClassifier(
            PromptedModel(backbone, ctx.hparams),
            {name: to_torch(array, device) for name, array in got.pools.items()},
            (to_torch(got.weight[got.seen], device), to_torch(got.bias[got.seen], device)),
            tuple(int(c) for c in got.classes[got.seen]),
            ctx.micro_batch,
        )
