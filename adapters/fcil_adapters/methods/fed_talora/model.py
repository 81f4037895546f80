"""How Fed-TaLoRA's broadcast becomes a linear classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.fed_talora.parts import HeadRows, read_parts
from fcil_adapters.methods.fed_talora.views import merged_view
from fcil_adapters.scoring import Scorer
from fcil_protocol.payload import Payload


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge residuals and LoRA into a view; candidates are the classes that anybody had."""
        received = read_parts(ctx.hparams, broadcast)
        rows = HeadRows.joined(received.tasks)
        rows = rows.chosen(rows.seen)
        view = merged_view(backbone, ctx.hparams, received)
        weight = to_torch(rows.weight, backbone.device)  # (C, d)
        bias = to_torch(rows.bias, backbone.device)  # (C,)

        def score(pixels: Tensor) -> Tensor:
            features = cls_features(view, backbone.normalise(pixels))  # (b, d)
            return functional.linear(features, weight, bias)

        return Scorer(tuple(int(c) for c in rows.classes), score, ctx.micro_batch)
