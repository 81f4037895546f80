"""The head: from the tasks' statistics to scores of all classes (no torch)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from fcil_adapters.backbones.frozen_features import Extractor, FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.numerics.scores import negative_distances
from numpy.typing import NDArray

SMALLEST = 1e-6  # variance; features that never vary would be divided by 0


class Model:
    """Puts the tasks of a broadcast side by side."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Extractor
    ) -> Predictor:
        """Take every class of which a client had an image."""
        tasks = list(broadcast.values())
        known = np.concatenate([part.i64("count") for part in tasks]) > 0
        classes = np.concatenate([part.i64("classes") for part in tasks])[known]
        mean = np.concatenate([part.f32("mean") for part in tasks])[known]  # (C, d)
        own = variance(tasks)  # (d,)
        share = ctx.hparams.shrinkage
        shrunk = (1 - share) * own + share * own.mean() + SMALLEST
        weights = (mean.astype(np.float64), np.sqrt(shrunk))
        return FeatureScorer(
            tuple(classes.tolist()), backbone, score, weights, ctx.micro_batch
        )


def variance(tasks: list[Payload]) -> NDArray[np.float64]:
    """Return the features' variance around the means of their classes: (d,)."""
    total, images = np.zeros(()), 0
    for part in tasks:
        count = part.i64("count")
        squares = count.sum() * part.f32("square")[0].astype(np.float64)
        total = total + squares - count @ np.square(part.f32("mean"), dtype=np.float64)
        images += int(count.sum())
    return np.maximum(total / max(images, 1), 0)


def score(features: Any, mean: Any, spread: Any) -> Any:
    """Score features (b, d) by class means (C, d) and the spread (d,): (b, C)."""
    return negative_distances(features / spread, mean / spread)
