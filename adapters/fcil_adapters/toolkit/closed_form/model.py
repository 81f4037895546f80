"""From the broadcast to the linear classifier (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.numerics.scores import linear, unit_rows
from fcil_adapters.numerics.task_parts import CURRENT, find_part
from fcil_adapters.toolkit.closed_form.lift import lift_matrices, projected, read_seed


class SumsModel:
    """Scores are W phi(x) + b; the candidates are the classes of which any client had an image."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Read the rows and derive the projection."""
        head = find_part(broadcast, CURRENT)
        weight, bias = (head.f32(n).astype(np.float64) for n in ("weight", "bias"))
        matrices = lift_matrices(ctx.hparams, ctx.backbone_info.dim, read_seed(broadcast))
        classes = tuple(head.i64("classes").tolist())
        score = SCORES[ctx.hparams.features]
        return FeatureScorer(classes, backbone, score, (weight, bias, *matrices), ctx.micro_batch)


def score_linear(features: Any, weight: Any, bias: Any) -> Any:
    """Return the scores (B, C) of features (B, d) by rows (C, d)."""
    return linear(unit_rows(features), weight, bias)


def score_projected(features: Any, weight: Any, bias: Any, matrix: Any) -> Any:
    """Return the scores (B, C) of features (B, d) by rows (C, D) and a projection (d, D)."""
    return linear(projected(unit_rows(features), matrix), weight, bias)


def score_both(features: Any, weight: Any, bias: Any, matrix: Any) -> Any:
    """Return the scores (B, C) of features (B, d) by rows (C, d + D) and a projection (d, D)."""
    d = matrix.shape[0]
    rows = unit_rows(features)
    return rows @ weight[:, :d].T + linear(projected(rows, matrix), weight[:, d:], bias)


SCORES: dict[str, Callable[..., Any]] = {
    "both": score_both,
    "relu_projection": score_projected,
    "linear": score_linear,
}
