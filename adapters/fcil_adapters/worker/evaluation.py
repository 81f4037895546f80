"""Counts of a predictor's right answers by class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import ImageSet, Predictor

I64 = NDArray[np.int64]


def predict(predictor: Predictor, images: NDArray[np.uint8]) -> I64:
    """Return the likeliest class id of each preprocessed image: (B,), -1 without candidates.

    The lower column wins a tie.
    """
    classes = np.asarray(predictor.classes, dtype=np.int64)  # (C,)
    if classes.size == 0:
        return np.full(len(images), -1, dtype=np.int64)
    likeliest: I64 = classes[np.argmax(predictor.logits(images), axis=1)]
    return likeliest


def evaluate(predictor: Predictor, images: ImageSet, batch: int = 256) -> tuple[I64, I64, I64]:
    """Classify every image of a set.

    Args:
        predictor: a composed model.
        images: labelled images; a label that is not a candidate counts as wrong.
        batch: images per call of the predictor.

    Returns:
        The class ids present, ascending; right answers and images of each: three (C,) arrays.
    """
    labels = images.labels  # (N,)
    right = np.zeros(len(images), dtype=bool)
    for start in range(0, len(images), batch):
        index = np.arange(start, min(start + batch, len(images)), dtype=np.int64)
        right[index] = predict(predictor, images.take(index)) == labels[index]
    classes, position = np.unique(labels, return_inverse=True)
    correct = np.bincount(position[right], minlength=len(classes))
    total = np.bincount(position, minlength=len(classes))
    return classes.astype(np.int64), correct.astype(np.int64), total.astype(np.int64)
