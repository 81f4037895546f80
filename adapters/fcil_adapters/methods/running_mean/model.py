"""From the means to a classifier: the nearest mean wins."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.running_mean.thumbnails import area_weights, grey_areas
from fcil_adapters.numerics.scores import negative_distances


class Model:
    """Concatenates the tasks of a broadcast."""

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Build the classifier of every class of which any client had an image."""
        means = np.zeros((0, ctx.hparams.side**2), dtype=np.float32)
        classes: list[int] = []
        for name in sorted(broadcast, key=_order):
            part = broadcast[name]
            known = part.i64("count") > 0
            means = np.concatenate([means, part.f32("mean")[known]])
            classes.extend(part.i64("classes")[known].tolist())
        areas = area_weights(ctx.backbone_info.preprocessing.size, ctx.hparams.side)
        weights = (areas, means.astype(np.float64))
        return FeatureScorer(tuple(classes), None, score, weights, ctx.micro_batch)


def score(pixels: Any, areas: Any, means: Any) -> Any:
    """Return the negative squared distances of thumbnails to the means: (B, C)."""
    return negative_distances(grey_areas(pixels, areas), means)


def _order(part: str) -> tuple[bool, int]:
    """Sort ``task/0``, ``task/1``, ..., ``current``."""
    _, _, number = part.partition("/")
    return (not number, int(number or 0))
