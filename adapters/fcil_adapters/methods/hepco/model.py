"""How HePCo's broadcast becomes a classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.hepco.parts import read_parts
from fcil_adapters.methods.hepco.prompting import PromptedModel
from fcil_adapters.prompts import query_features
from fcil_adapters.scoring import Scorer
from fcil_protocol.payload import Payload


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Attach the pools to a view; candidates are the classes that anybody had."""
        got = read_parts(broadcast)
        model = PromptedModel(backbone, ctx.hparams)
        pools = {name: to_torch(array, backbone.device) for name, array in got.pools.items()}
        weight = to_torch(got.weight[got.seen], backbone.device)  # (C, d)
        bias = to_torch(got.bias[got.seen], backbone.device)  # (C,)

        def score(pixels: Tensor) -> Tensor:
            queries = query_features(model.backbone, pixels)
            return functional.linear(model.features(pixels, queries, pools), weight, bias)

        return Scorer(tuple(got.classes[got.seen].tolist()), score, ctx.micro_batch)
