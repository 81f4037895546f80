"""How Fed-TaLoRA's broadcast becomes a linear classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.fed_talora.parts import HeadRows, read_parts
from fcil_adapters.methods.fed_talora.views import merged_view
from fcil_protocol.payload import Payload


class LinearHead:
    """Scores are the head's outputs for the seen classes, on the adapted features."""

    def __init__(
        self, backbone: Backbone, view: Any, rows: HeadRows, micro_batch: int | None
    ) -> None:
        self.classes = tuple(int(c) for c in rows.classes)
        self._backbone = backbone
        self._view = view
        self._weight = to_torch(rows.weight, backbone.device)  # (C, d)
        self._bias = to_torch(rows.bias, backbone.device)  # (C,)
        self._micro_batch = micro_batch

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self._micro_batch or max(len(images), 1))
            return np.concatenate([self._score(part) for part in parts])

    def _score(self, pixels: Tensor) -> NDArray[np.float32]:
        features = cls_features(self._view, self._backbone.normalise(pixels))  # (b, d)
        return to_numpy(functional.linear(features, self._weight, self._bias))


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge residuals and LoRA into a view; candidates are the classes that anybody had."""
        received = read_parts(ctx.hparams, broadcast)
        rows = HeadRows.joined(received.tasks)
        view = merged_view(backbone, ctx.hparams, received)
        return LinearHead(backbone, view, rows.chosen(rows.seen), ctx.micro_batch)
