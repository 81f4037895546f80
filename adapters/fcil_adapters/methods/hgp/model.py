"""How HGP's broadcast becomes a classifier: a frozen pass for the query, then a prompted one."""

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
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.prompts import PromptedView, query_features
from fcil_protocol.payload import Payload


class PromptedHead:
    """Scores are a linear head's logits over prompted features."""

    def __init__(
        self,
        backbone: Backbone,
        pools: Pools,
        classes: tuple[int, ...],
        weight: Tensor,
        bias: Tensor,
        micro_batch: int | None,
    ) -> None:
        self.classes = classes
        self._backbone = backbone
        self._view = PromptedView(backbone, pools.h.blocks)
        self._pools = pools
        self._weight = weight  # (C, d)
        self._bias = bias  # (C,)
        self._micro_batch = micro_batch

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self._micro_batch or max(len(images), 1))
            return np.concatenate([self._score(part) for part in parts])

    def _score(self, pixels: Tensor) -> NDArray[np.float32]:
        prompts = self._pools.prompts(query_features(self._backbone, pixels))
        features = self._view.forward(self._backbone.normalise(pixels), prompts)  # (b, d)
        return to_numpy(functional.linear(features, self._weight, self._bias))


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Put the prompts of all tasks into one pool; candidates are classes that anybody had."""
        h: HgpHparams = ctx.hparams
        known = read_parts(broadcast)
        device = backbone.device
        return PromptedHead(
            backbone,
            Pools.of(h, known.prompts, device),
            tuple(int(c) for c in known.classes[known.seen]),
            to_torch(known.weight[known.seen], device),
            to_torch(known.bias[known.seen], device),
            ctx.micro_batch,
        )
