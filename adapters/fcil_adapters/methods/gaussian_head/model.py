"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.numerics.scores import linear, quadratic
from fcil_adapters.numerics.task_parts import CURRENT, find_part


class Model:
    """Scores are W f(x) + b, or a quadratic form; the candidates are the described classes."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the head."""
        head, bends = find_part(broadcast, CURRENT), ctx.hparams.head == "quadratic"
        names = ("weight", "bias", *(("turn", "offset") if bends else ()))
        weights = tuple(head.f32(name).astype(np.float64) for name in names)
        classes = tuple(head.i64("classes").tolist())
        score = quadratic if bends else linear
        return FeatureScorer(classes, backbone, score, weights, ctx.micro_batch)
