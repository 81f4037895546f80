"""adapt_once's client half: train in the first task, then sum features (torch to train only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.adapt_once.options import AdaptOnceHparams
from fcil_adapters.methods.adapt_once.parts import (
    COLLECT,
    TRAIN,
    UPLOAD_DIGEST,
    digest_bytes,
    frozen_backbone,
    training_parts,
)
from fcil_adapters.toolkit.closed_form.learner import SumsLearner


class Learner:
    """Its state is that of `SumsLearner`; all else follows from images and broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the LoRA and its head, or return the sums of the frozen backbone's features."""
        h: AdaptOnceHparams = ctx.hparams
        if ctx.kind == TRAIN:
            from fcil_adapters.toolkit.lora.halves import LoraLearner  # loads torch

            adapting = replace(ctx, hparams=h.adapt)
            return LoraLearner().run(adapting, state, training_parts(broadcast), data)
        backbone = frozen_backbone(h, ctx.backbone, broadcast)
        # What is drawn is what analytic draws, whose rounds are of these kinds.
        kind = TRAIN if ctx.kind == COLLECT else ctx.kind
        summing = replace(ctx, kind=kind, backbone=backbone)
        state, sent = SumsLearner().run(summing, state, broadcast, data)
        if not h.adapts:
            return state, sent
        digest = {UPLOAD_DIGEST: digest_bytes(backbone.info.digest)}
        return state, Payload({**sent.tensors, **digest}, sent.meta)
