"""L2P's model: from a broadcast to a classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.l2p.options import L2pHparams
from fcil_adapters.methods.l2p.pool import Pool
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.scorer import Head
from fcil_adapters.toolkit.prompts.client import scorer
from fcil_adapters.toolkit.prompts.parts import read_parts
from fcil_adapters.toolkit.prompts.prefix import with_pixels


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Put chosen prompts before tokens; candidates are the classes that any client had."""
        h: L2pHparams = ctx.hparams
        known = read_parts(broadcast)
        same = with_pixels(backbone, h.pixels)
        (last,) = known.prompts
        tensors = {n: to_torch(array, backbone.device) for n, array in last.items()}
        features = Pool.of(h, same, tensors).features
        return scorer(ctx, same, features, Head.linear(known.head, backbone.device))
