"""Fed-CPrompt's model: from a broadcast to a classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.toolkit.prompts.client import component_scorer
from fcil_adapters.toolkit.prompts.parts import read_parts
from fcil_protocol.payloads.payload import Payload


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Sum the components of all tasks; candidates are the classes that any client had."""
        return component_scorer(ctx, ctx.hparams, read_parts(broadcast), backbone)
