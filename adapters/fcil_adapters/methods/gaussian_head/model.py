"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.numerics.scores import linear
from fcil_adapters.numerics.task_parts import CURRENT, find_part


class Model:
    """Scores are W f(x) + b; the candidates are the described classes."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the head."""
        head = find_part(broadcast, CURRENT)
        weights = (
            head.f32("weight").astype(np.float64),  # (C, d)
            head.f32("bias").astype(np.float64),  # (C,)
        )
        classes = tuple(head.i64("classes").tolist())
        return FeatureScorer(classes, backbone, linear, weights, ctx.micro_batch)
