"""A feature extractor in numpy, and the exact solutions of the methods without a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapters.kit import SIZE, Images
from fcil_adapters.contract import BackboneInfo, Preprocessing

WIDTH = 6


@dataclass(frozen=True)
class Colours:
    """No transformer and no torch: a fixed map of the four quarters' mean colours."""

    info: BackboneInfo = BackboneInfo(
        "colours", WIDTH, 1, 1, 4, Preprocessing(SIZE, (0.5,) * 3, (0.5,) * 3), "0" * 64
    )

    def features(self, images):
        half = SIZE // 2
        quarters = images.reshape(len(images), 2, half, 2, half, 3).mean(axis=(2, 4))
        matrix = np.random.default_rng(5).normal(size=(12, WIDTH))
        return ((quarters.reshape(len(images), 12) / 255 - 0.5) @ matrix).astype(np.float32)


def pooled(clients) -> Images:
    """One machine with everybody's images."""
    return Images(
        np.concatenate([images.pictures for images in clients]),
        np.concatenate([images.labels for images in clients]),
    )


def exact_analytic(h, phi, labels):
    """Return classes, rows (C, D) and biases (C,) of all images at once, by definition."""
    classes = np.unique(labels)
    targets = (labels[:, None] == classes).astype(float)  # (N, C)
    counts = targets.sum(0)
    means = targets.T @ phi / counts[:, None]
    size = np.trace(phi.T @ phi) / phi.shape[1]
    penalty = size * (h.rho if h.rho != "gcv" else cross_validated(phi, targets)[0])
    if h.form == "ridge":
        gram = phi.T @ phi
        weight = (means if h.balance == "server" else targets.T @ phi) @ np.linalg.inv(
            gram + penalty * np.eye(len(gram))
        )
        return classes, weight, np.zeros(len(classes))
    residuals = phi - targets @ means
    solved = np.linalg.inv(residuals.T @ residuals + penalty * np.eye(phi.shape[1]))
    degrees = len(phi) - len(classes)
    weight = max(degrees, 1) * means @ solved
    bias = np.array([-0.5 * row @ mean for row, mean in zip(weight, means, strict=True)])
    if h.prior == "counts" and degrees > 0:
        freedom = phi.shape[1] - penalty * np.trace(solved)
        bias += freedom / (2 * counts) + np.log(counts)
    return classes, weight, bias


def cross_validated(phi, targets):
    """Return the best rho of the grid and all GCV values, from the hat matrix of each."""
    n, size = len(phi), np.trace(phi.T @ phi) / phi.shape[1]
    found = {}
    for rho in 10.0 ** np.arange(-6, 3.125, 0.25):
        kernel = phi @ phi.T
        hat = np.linalg.solve(kernel + rho * size * np.eye(n), kernel)
        if np.trace(hat) <= 0.9 * n:
            rss = np.square(targets - hat @ targets).sum()
            found[rho] = rss / n / (1 - np.trace(hat) / n) ** 2
    return min(found, key=lambda rho: (found[rho], -rho), default=1e3), found
