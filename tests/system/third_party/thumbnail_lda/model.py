"""From means and covariance to a linear classifier over all classes seen so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Predictor
from fcil_protocol.payload import Payload
from thumbnail_lda.features import thumbnails


@dataclass(frozen=True)
class Linear:
    """The candidate classes, with weights (C, pixels) and biases (C,)."""

    classes: tuple[int, ...]
    weights: NDArray[np.float64]
    bias: NDArray[np.float64]
    side: int

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score images (B, S, S, 3): (B, C)."""
        scores = thumbnails(images, self.side) @ self.weights.T + self.bias
        return scores.astype(np.float32)


class Model:
    """w = P mu and b = -mu.w / 2 for each class mean mu, with P = ((1 - e) cov + e I)^-1."""

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Take every class of which somebody had an image."""
        e, side = ctx.hparams.shrinkage, ctx.hparams.side
        cov = broadcast["shared"].f32("cov").astype(np.float64)
        precision = np.linalg.inv((1 - e) * cov + e * np.eye(side**2))
        tasks = [part for name, part in sorted(broadcast.items()) if name != "shared"]
        count = np.concatenate([part.i64("count") for part in tasks])
        classes = np.concatenate([part.i64("classes") for part in tasks])[count > 0]
        mu = np.concatenate([part.f32("mean") for part in tasks])[count > 0]  # (C, pixels)
        weights = mu @ precision
        return Linear(tuple(classes.tolist()), weights, -(weights * mu).sum(axis=1) / 2, side)
