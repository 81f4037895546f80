"""HGP's broadcast as a classifier: a frozen pass for the query, then a prompted one."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.toolkit.gaussians.discriminant_head import DISCRIMINANT
from fcil_adapters.toolkit.heads.scorer import Head
from fcil_adapters.toolkit.prompts.client import scorer
from fcil_adapters.toolkit.prompts.pools import Prompted
from fcil_adapters.toolkit.prompts.prefix import with_pixels


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Put the prompts of all tasks into one pool.

        Candidates are the classes that anybody had, of a quadratic head those with a Gaussian.
        """
        h: HgpHparams = ctx.hparams
        known = read_parts(broadcast)
        model = with_pixels(backbone, h.pixels)
        pools = Pools.of(h, known.prompts, backbone.device)
        features = Prompted(model, h.blocks).features(pools.prompts)
        if DISCRIMINANT in broadcast:
            head = Head.quadratic(broadcast[DISCRIMINANT].tensors, backbone.device)
        else:
            head = Head.linear(known.head, backbone.device)
        return scorer(ctx, model, features, head)
