"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, Predictor
from fcil_adapters.frozen_features import F32, Extractor, FeatureScorer
from fcil_adapters.tasks import CURRENT, find_part
from fcil_protocol.payload import Payload


class Model:
    """Scores are W f(x) + b; the candidates are the classes that somebody described."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the head."""
        head = find_part(broadcast, CURRENT)
        weight, bias = head.f32("weight"), head.f32("bias")  # (C, d), (C,)

        def score(features: F32) -> F32:
            scores: F32 = features @ weight.T + bias
            return scores

        return FeatureScorer(tuple(head.i64("classes").tolist()), backbone, score, ctx.micro_batch)
