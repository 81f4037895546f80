"""HePCo's broadcast as a classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.hepco.parts import read_parts
from fcil_adapters.toolkit.prompts.client import pool_scorer


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Attach the pools to a view; candidates are the classes that anybody had."""
        return pool_scorer(ctx, ctx.hparams, read_parts(broadcast), backbone)
