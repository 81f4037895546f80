"""Linear discriminant analysis from the moments of a mixture of Gaussians."""

from __future__ import annotations

import numpy as np

from fcil_adapters.toolkit.gaussians.gaussian import F64
from fcil_adapters.toolkit.gaussians.mixture import Mixture


def discriminant(mixture: Mixture, shrinkage: float) -> tuple[F64, F64]:
    """Return weights (C, d) and biases (C,) whose logits are log posteriors up to a constant.

    All classes share the covariance within classes, S: a class's own is that of the images of all
    its clients together. w_c = P mu_c and b_c = log omega_c - mu_c P mu_c / 2 with P the inverse
    of (1 - e) S + e tr(S) / d I.

    Args:
        mixture: of at least one class.
        shrinkage: e.
    """
    means = np.stack([mixture.mean(c) for c in mixture.classes])  # (C, d)
    d = means.shape[1]
    rows, rest = [], np.zeros(d)
    for omega, pi, mean, own in zip(
        mixture.omega, mixture.pi, means, mixture.gaussians, strict=True
    ):
        for share, gaussian in zip(omega * pi, own, strict=True):
            apart = (gaussian.mean - mean)[None]  # (1, d)
            rows += [np.sqrt(share) * gaussian.factor, np.sqrt(share) * apart]
            rest += share * gaussian.rest
    stacked = np.concatenate(rows).astype(np.float64)
    within = stacked.T @ stacked + np.diag(rest)  # (d, d)
    size = max(float(np.trace(within)) / d, np.finfo(np.float32).tiny)
    weights: F64 = np.linalg.solve(
        (1 - shrinkage) * within + shrinkage * size * np.eye(d), means.T
    ).T
    biases: F64 = np.log(mixture.omega) - 0.5 * (weights * means).sum(axis=1)
    return weights, biases
