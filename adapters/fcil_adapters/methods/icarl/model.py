"""iCaRL's classifier: the nearest mean of features of length 1 (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.icarl.parts import MEANS
from fcil_adapters.toolkit.lora.class_means import ClassMeans
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.nearest_mean import nearest_scorer
from fcil_adapters.toolkit.lora.views import merged_view


class Model:
    """Nearest mean by cosine, which for a feature and means of length 1 is the same."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Build the classifier of every class with a mean (Algorithm 1)."""
        view = merged_view(backbone, ctx.hparams, read_parts(ctx.hparams, broadcast).lora)
        part = broadcast.get(MEANS)
        d = ctx.backbone_info.dim
        means = (
            ClassMeans(np.zeros((0, d), np.float32), np.zeros(0, np.int64))
            if part is None
            else ClassMeans(part.f32("means"), part.i64("classes"))
        )
        return nearest_scorer(ctx, backbone, view, means, cosine=True)
