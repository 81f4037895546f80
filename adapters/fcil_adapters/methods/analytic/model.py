"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.analytic.lift import lift, lift_matrices
from fcil_adapters.methods.analytic.parts import read_seed
from fcil_adapters.numerics.task_parts import CURRENT, find_part


class Model:
    """Scores are W phi(x); the candidates are the classes of which any client had an image."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the rows and derive the projection."""
        head = find_part(broadcast, CURRENT)
        weight = head.f32("weight").astype(np.float64)  # (C, D)
        matrices = lift_matrices(ctx.hparams, ctx.backbone_info.dim, read_seed(broadcast))
        classes = tuple(head.i64("classes").tolist())
        return FeatureScorer(classes, backbone, score, (weight, *matrices), ctx.micro_batch)


def score(features: Any, weight: Any, *matrices: Any) -> Any:
    """Return W phi(x): features (B, d) and rows (C, D) -> (B, C)."""
    return lift(features, *matrices) @ weight.T
