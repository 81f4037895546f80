"""Pictures as vectors, the same for the learner and the model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def areas(size: int, side: int) -> NDArray[np.float64]:
    """Return what averages ``size`` pixels over ``side`` intervals: (side, size)."""
    edges = np.arange(side + 1) * size // side  # where the intervals begin and end
    pixels = np.arange(size)
    inside = (edges[:-1, None] <= pixels) & (pixels < edges[1:, None])
    return inside / inside.sum(axis=1, keepdims=True)


def thumbnails(images: Any, mean: Any) -> Any:
    """Return the mean grey values of side x side areas: (B, S, S, 3) to (B, side * side)."""
    grey = images.mean(axis=3) / 255  # (B, S, S)
    small = mean @ grey @ mean.T  # (B, side, side)
    return small.reshape(-1, len(mean) ** 2)
