"""CCVR's client half: train by cross-entropy; at the end, describe the classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import cls_features
from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.ccvr.options import CcvrHparams
from fcil_adapters.toolkit.gaussians.reports import report_gaussians
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.manifest import LoraBroadcast, read_parts
from fcil_adapters.toolkit.lora.views import merged_view
from fcil_adapters.toolkit.training.optimise import all_features


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train, or send Gaussians of the trained model's features."""
        received = read_parts(ctx.hparams, broadcast)
        if ctx.kind == "finish":
            return state, _described(ctx, received, data)
        return state, Payload(train_round(ctx, LoraSetup.of(ctx, received), data))


def _described(ctx: Context, received: LoraBroadcast, data: ImageSet) -> Payload:
    h: CcvrHparams = ctx.hparams
    view = merged_view(ctx.backbone, h, received.lora)
    features = all_features(
        ctx,
        lambda pixels: cls_features(view, ctx.backbone.normalise(pixels)),
        data,
        batch_size=h.batch_size,
    )
    return Payload(report_gaussians(ctx, h, features, data))
