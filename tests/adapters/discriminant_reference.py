"""The quadratic discriminant by dense inverses and determinants, class by class."""

from __future__ import annotations

import numpy as np

FEW = 8  # a class with fewer images has no covariance of its own


def log_posteriors(mixture, x, rank, shares) -> np.ndarray:
    """Return the log posteriors (N, C) of features x (N, d), up to a constant of each image.

    Args:
        mixture: `fcil_adapters.toolkit.gaussians.mixture.Mixture`.
        x: (N, d).
        rank: directions of a class's own.
        shares: of a class's own covariance, of the mean one, of the identity.
    """
    d = x.shape[1]
    covariances, own = [], []
    for pi, gaussians in zip(mixture.pi, mixture.gaussians, strict=True):
        mean = sum(p * g.mean for p, g in zip(pi, gaussians, strict=True))
        apart = [np.outer(g.mean - mean, g.mean - mean) for g in gaussians]
        several = [g.count > 1 for g in gaussians]
        whole = [g.covariance() * s + a for g, s, a in zip(gaussians, several, apart, strict=True)]
        parts = [
            g.factor.T @ g.factor * s + a for g, s, a in zip(gaussians, several, apart, strict=True)
        ]
        covariances.append(sum(p * s for p, s in zip(pi, whole, strict=True)))
        values, vectors = np.linalg.eigh(sum(p * s for p, s in zip(pi, parts, strict=True)))
        count = sum(g.count for g in gaussians)
        top = slice(max(0, d - min(rank, count - 1)), None)
        kept = vectors[:, top] * values[top] @ vectors[:, top].T
        own.append(kept if count >= FEW else np.zeros((d, d)))
    pool = sum(w * s for w, s in zip(mixture.omega, covariances, strict=True))
    own_share, pooled_share, identity_share = shares
    shared = pooled_share * pool + identity_share * np.trace(pool) / d * np.eye(d)
    scores = []
    for label, omega, covariance in zip(mixture.classes, mixture.omega, own, strict=True):
        sigma = own_share * covariance + shared
        away = x - mixture.mean(label)
        square = np.einsum("ni,ij,nj->n", away, np.linalg.inv(sigma), away)
        scores.append(np.log(omega) - (square + np.linalg.slogdet(sigma)[1]) / 2)
    return np.stack(scores, 1)


def from_first(scores) -> np.ndarray:
    """Return scores without what is common to an image's classes."""
    return scores - scores[:, :1]
