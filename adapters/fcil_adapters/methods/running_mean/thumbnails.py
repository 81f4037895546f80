"""Small grey versions of pictures, by averaging areas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def thumbnails(images: NDArray[np.uint8], side: int) -> F64:
    """Return grey thumbnails of images (B, S, S, 3): (B, side * side) in [0, 1]."""
    small: F64 = grey_areas(images, area_weights(images.shape[1], side))
    return small


def grey_areas(images: Any, areas: Any) -> Any:
    """Return grey thumbnails by `area_weights`; arrays or tensors, see `numerics.scores`."""
    grey = images.mean(axis=3) / 255  # (B, S, S)
    small = areas @ grey @ areas.T  # (B, side, side)
    return small.reshape(-1, len(areas) ** 2)


def area_weights(size: int, side: int) -> F64:
    """Return the share of each of ``size`` pixels in each of ``side`` equal intervals.

    (side, size); rows sum to 1. A pixel that two intervals cut counts in both.
    """
    edges = np.linspace(0, size, side + 1)  # in pixels
    pixels = np.arange(size)
    low = np.maximum(edges[:-1, None], pixels)
    high = np.minimum(edges[1:, None], pixels + 1)
    share: F64 = np.maximum(high - low, 0) * side / size
    return share
