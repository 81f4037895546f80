"""Pictures as vectors, the same for the learner and the model."""

import numpy as np
from numpy.typing import NDArray


def thumbnails(images: NDArray[np.uint8], side: int) -> NDArray[np.float64]:
    """Return the mean grey values of side x side areas: (B, S, S, 3) to (B, side * side)."""
    edges = np.arange(side) * images.shape[1] // side  # where the areas begin
    grey = images.mean(axis=3) / 255  # (B, S, S)
    sums = np.add.reduceat(np.add.reduceat(grey, edges, axis=1), edges, axis=2)
    widths = np.diff([*edges, images.shape[1]])
    small: NDArray[np.float64] = sums / np.outer(widths, widths)  # (B, side, side)
    return small.reshape(len(images), side**2)
