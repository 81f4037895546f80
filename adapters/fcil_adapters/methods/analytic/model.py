"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Predictor
from fcil_adapters.frozen_features import F32, Extractor, FeatureScorer
from fcil_adapters.methods.analytic.lift import make_lift
from fcil_adapters.methods.analytic.parts import read_seed
from fcil_adapters.tasks import CURRENT, find_part
from fcil_protocol.payload import Payload


class Model:
    """Scores are W phi(x); the candidates are the classes of which somebody had an image."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the rows and derive the projection."""
        head = find_part(broadcast, CURRENT)
        lift = make_lift(ctx.hparams, ctx.backbone_info.dim, read_seed(broadcast))
        weight = head.f32("weight").astype(np.float64)  # (C, D)

        def score(features: F32) -> NDArray[np.float64]:
            scores: NDArray[np.float64] = lift(features) @ weight.T
            return scores

        return FeatureScorer(tuple(head.i64("classes").tolist()), backbone, score, ctx.micro_batch)
