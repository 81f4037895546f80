"""Gaussians of class features from noised sums (torch-free); `gaussian` has their forms.

A class's mean is released first. Its covariance is then made of the residuals from that noised
mean, which is public: residuals are shorter than features, so less is clipped and no large mean is
squared into the noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract.privacy import F64, Privacy
from fcil_adapters.toolkit.gaussians.gaussian import (
    Covariance,
    Gaussian,
    describe,
    factor_rows,
    is_triangle,
)


def describe_with(
    privacy: Privacy, features: NDArray[Any], covariance: Covariance, rank: int
) -> Gaussian:
    """Summarise the features of one class, with noise if it is on.

    Args:
        privacy: the round's.
        features: (n, d), n >= 1, of the broadcast's model if the noise is on.
        covariance: as `gaussian.describe` has it; all forms are made of the noised scatter alone,
            so they reveal no more than it does.
        rank: q of ``lowrank``.
    """
    if not privacy.on:
        return describe(features, covariance, rank)
    x = privacy.clipped(features)
    n, d = x.shape
    mean = privacy.released_sums(x.sum(axis=0)[None], np.array([n]))[0] / n  # (d,)
    if n == 1:
        return Gaussian(1, mean, np.zeros((0, d)), np.zeros(d))
    scatter = privacy.released_scatter(x - mean, diagonal=covariance == "diag") / (n - 1)
    if covariance == "diag":
        return Gaussian(n, mean, np.zeros((0, d)), np.maximum(scatter, 0))
    rows = d if is_triangle(n, d, covariance) else factor_rows(n, d, covariance, rank)
    factor = _leading(scatter, rows)
    rest = np.diag(scatter) - np.square(factor).sum(axis=0)
    kept = np.zeros(d) if covariance == "full" else np.maximum(rest, 0)
    return Gaussian(n, mean, factor, kept)


def _leading(symmetric: F64, rows: int) -> F64:
    """Return F (rows, d): F^T F has the largest eigenvalues, negative ones set to zero."""
    values, vectors = np.linalg.eigh(symmetric)  # ascending
    lengths = np.sqrt(np.maximum(values[::-1][:rows], 0))
    factor: F64 = lengths[:, None] * vectors[:, ::-1][:, :rows].T
    return factor
