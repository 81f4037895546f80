"""FedProto's classifier: the head, or the nearest prototype (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.fedproto.parts import read_prototypes
from fcil_adapters.toolkit.lora.class_means import ClassMeans
from fcil_adapters.toolkit.lora.halves import LinearModel
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.nearest_mean import nearest_scorer
from fcil_adapters.toolkit.lora.views import merged_view


class Model(LinearModel):
    """The linear model, unless the nearest prototype decides (Tan et al., Eq. 8)."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that any client had."""
        if ctx.hparams.inference == "head":
            return super().compose(ctx, broadcast, backbone)
        view = merged_view(backbone, ctx.hparams, read_parts(ctx.hparams, broadcast).lora)
        classes, rows = read_prototypes(broadcast)
        means = ClassMeans(rows, np.asarray(classes, dtype=np.int64))
        return nearest_scorer(ctx, backbone, view, means, cosine=False)
