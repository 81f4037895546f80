"""How HGP's broadcast becomes a classifier: a frozen pass for the query, then a prompted one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.prompts import PromptedView, query_features, with_pixels
from fcil_adapters.scoring import Scorer
from fcil_protocol.payload import Payload


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Put the prompts of all tasks into one pool; candidates are classes that anybody had."""
        h: HgpHparams = ctx.hparams
        known = read_parts(broadcast)
        model = with_pixels(backbone, h.pixels)
        view = PromptedView(model, h.blocks)
        pools = Pools.of(h, known.prompts, backbone.device)
        weight = to_torch(known.weight[known.seen], backbone.device)  # (C, d)
        bias = to_torch(known.bias[known.seen], backbone.device)  # (C,)

        def score(pixels: Tensor) -> Tensor:
            prompts = pools.prompts(query_features(model, pixels))
            features = view.forward(model.normalise(pixels), prompts)  # (b, d)
            return functional.linear(features, weight, bias)

        return Scorer(tuple(known.classes[known.seen].tolist()), score, ctx.micro_batch)
