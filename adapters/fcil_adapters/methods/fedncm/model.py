"""From class means to a classifier: the nearest mean wins (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Predictor
from fcil_adapters.frozen_features import F32, Extractor, FeatureScorer
from fcil_adapters.methods.fedncm.options import FedncmHparams
from fcil_adapters.tasks import CURRENT, find_part, task_part
from fcil_protocol.payload import Payload

F64 = NDArray[np.float64]

_TINY = np.finfo(np.float64).tiny


class Model:
    """Puts the tasks of a broadcast side by side."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Take every class of which somebody had an image."""
        h: FedncmHparams = ctx.hparams
        names = [*(task_part(t) for t in range(len(broadcast) - 1)), CURRENT]
        parts = [find_part(broadcast, name) for name in names]
        known = np.concatenate([part.i64("count") for part in parts]) > 0
        classes = np.concatenate([part.i64("classes") for part in parts])[known]
        means = np.concatenate([part.f32("mean") for part in parts])[known]  # (C, d)
        wide = means.astype(np.float64)
        compare = cosines if h.metric == "cosine" else negative_distances

        def score(features: F32) -> F64:
            return compare(features.astype(np.float64), wide)

        return FeatureScorer(tuple(classes.tolist()), backbone, score, ctx.micro_batch)


def cosines(features: F64, means: F64) -> F64:
    """Return the cosines between features (B, d) and means (C, d): (B, C)."""
    scores: F64 = unit_rows(features) @ unit_rows(means).T
    return scores


def negative_distances(features: F64, means: F64) -> F64:
    """Return the negative squared distances between features (B, d) and means (C, d): (B, C)."""
    squares = np.square(features).sum(1)[:, None] + np.square(means).sum(1)  # (B, C)
    scores: F64 = 2 * features @ means.T - squares
    return scores


def unit_rows(rows: F64) -> F64:
    """Return rows of length 1; zero stays."""
    scaled: F64 = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    return scaled
