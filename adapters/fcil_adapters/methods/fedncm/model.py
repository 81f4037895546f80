"""From class means to a classifier: the nearest mean wins (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.fedncm.options import FedncmHparams
from fcil_adapters.numerics.scores import cosines, negative_distances
from fcil_adapters.numerics.task_parts import CURRENT, find_part, task_part


class Model:
    """Concatenates the tasks of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Build the classifier of every class of which any client had an image."""
        h: FedncmHparams = ctx.hparams
        names = [*(task_part(t) for t in range(len(broadcast) - 1)), CURRENT]
        parts = [find_part(broadcast, name) for name in names]
        known = np.concatenate([part.i64("count") for part in parts]) > 0
        classes = np.concatenate([part.i64("classes") for part in parts])[known]
        means = np.concatenate([part.f32("mean") for part in parts])[known]  # (C, d)
        score = cosines if h.metric == "cosine" else negative_distances
        weights = (means.astype(np.float64),)
        return FeatureScorer(tuple(classes.tolist()), backbone, score, weights, ctx.micro_batch)
