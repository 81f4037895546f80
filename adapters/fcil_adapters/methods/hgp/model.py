"""HGP's broadcast as a classifier: a frozen pass for the query, then a prompted one."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.toolkit.prompts.client import scorer
from fcil_adapters.toolkit.prompts.pools import Prompted
from fcil_adapters.toolkit.prompts.prefix import with_pixels


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Put the prompts of all tasks into one pool; candidates are classes that anybody had."""
        h: HgpHparams = ctx.hparams
        known = read_parts(broadcast)
        model = with_pixels(backbone, h.pixels)
        pools = Pools.of(h, known.prompts, backbone.device)
        features = Prompted(model, h.blocks).features(pools.prompts)
        return scorer(ctx, model, features, known)
