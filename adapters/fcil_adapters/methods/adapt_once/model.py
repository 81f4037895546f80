"""From the broadcast to the linear classifier on the adapted backbone (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.frozen_features import ReplaceableWeights
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.adapt_once.parts import frozen_backbone
from fcil_adapters.toolkit.closed_form.model import SumsModel


class Model:
    """The model of `analytic` on the backbone with the LoRA merged."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: ReplaceableWeights
    ) -> Predictor:
        """Merge the LoRA and read the classifier."""
        return SumsModel().compose(
            ctx, broadcast, frozen_backbone(ctx.hparams, backbone, broadcast)
        )
