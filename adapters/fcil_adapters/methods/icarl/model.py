"""iCaRL's classifier: the nearest mean of features of length 1 (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fcil_adapters.array_scores import cosines
from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.lora_head import read_parts
from fcil_adapters.lora_head_views import merged_view
from fcil_adapters.methods.icarl.parts import MEANS
from fcil_adapters.scoring import Scorer
from fcil_protocol.payload import Payload


class Model:
    """Between a feature and means of length 1 the nearest is the one with the largest cosine."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Take every class whose mean anybody told (Algorithm 1)."""
        view = merged_view(backbone, ctx.hparams, read_parts(ctx.hparams, broadcast).lora)
        part = broadcast.get(MEANS)
        classes = () if part is None else tuple(part.i64("classes").tolist())
        rows = (
            np.zeros((0, ctx.backbone_info.dim), np.float32) if part is None else part.f32("means")
        )
        means = to_torch(rows, backbone.device)  # (C, d)

        def score(pixels: Tensor) -> Tensor:
            features = cls_features(view, backbone.normalise(pixels))  # (b, d)
            scores: Tensor = cosines(features, means)
            return scores

        return Scorer(classes, score, ctx.micro_batch)
