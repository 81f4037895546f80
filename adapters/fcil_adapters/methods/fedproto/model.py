"""FedProto's classifier: the head, or the nearest prototype (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.heads import squared_distances
from fcil_adapters.lora_head import read_parts
from fcil_adapters.lora_head_model import LinearModel
from fcil_adapters.lora_head_views import merged_view
from fcil_adapters.methods.fedproto.parts import read_prototypes
from fcil_adapters.scoring import Scorer
from fcil_protocol.payload import Payload


class Model(LinearModel):
    """The room's, unless the nearest prototype decides (Tan et al., Eq. 8)."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that anybody had."""
        if ctx.hparams.inference == "head":
            return super().compose(ctx, broadcast, backbone)
        view = merged_view(backbone, ctx.hparams, read_parts(ctx.hparams, broadcast).lora)
        classes, rows = read_prototypes(broadcast)
        prototypes = to_torch(rows, backbone.device)  # (C, d)

        def score(pixels: Tensor) -> Tensor:
            features = cls_features(view, backbone.normalise(pixels))  # (b, d)
            return -squared_distances(features, prototypes)

        return Scorer(classes, score, ctx.micro_batch)
