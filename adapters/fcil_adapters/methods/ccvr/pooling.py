"""One Gaussian for each class, from those of its clients.

Eq. 3 and 4 of the paper, with n_k images of a class on client k and N of all:

    mu = sum_k n_k / N mu_k
    Sigma = sum_k (n_k - 1) / (N - 1) Sigma_k + sum_k n_k / (N - 1) (mu_k - mu)(mu_k - mu)^T

One machine with all images would compute the same. Factors lose nothing: those of the clients and
the differences of their means are stacked. A class with a single image overall keeps the covariance
that it borrowed (`make_mixture`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcil_adapters.toolkit.gaussians.gaussian import Gaussian
from fcil_adapters.toolkit.gaussians.mixture import F64, Mixture


def pooled(mixture: Mixture) -> Mixture:
    """Return a mixture with one component for each class."""
    merged = [
        (merge_gaussians(gaussians, pi),)
        for gaussians, pi in zip(mixture.gaussians, mixture.pi, strict=True)
    ]
    return replace(mixture, pi=tuple(np.ones(1) for _ in merged), gaussians=tuple(merged))


def merge_gaussians(gaussians: tuple[Gaussian, ...], pi: F64) -> Gaussian:
    """Return the Gaussian of all images of a class.

    Args:
        gaussians: of M clients.
        pi: (M,), their shares of the class's images, capped; they sum to 1.
    """
    if len(gaussians) == 1:
        return gaussians[0]
    total = sum(g.count for g in gaussians)
    counts = pi * total  # n_k, as far as a client may claim them
    means = np.stack([g.mean for g in gaussians]).astype(np.float64)  # (M, d)
    mean = pi @ means
    inner = np.maximum(counts - 1, 0) / (total - 1)  # (M,)
    between = np.sqrt(counts / (total - 1))[:, None] * (means - mean)  # (M, d)
    rows = [np.sqrt(w) * g.factor for w, g in zip(inner, gaussians, strict=True)]
    rest = inner @ np.stack([g.rest for g in gaussians])
    return Gaussian(total, mean, np.concatenate([*rows, between]), rest)
