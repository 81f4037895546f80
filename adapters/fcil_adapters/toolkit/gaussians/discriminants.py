"""Discriminant analysis from the moments of a mixture of Gaussians, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcil_adapters.toolkit.gaussians.discriminant_head import QuadraticHparams
from fcil_adapters.toolkit.gaussians.gaussian import F64
from fcil_adapters.toolkit.gaussians.mixture import Mixture
from fcil_protocol.payloads.payload import Array

FEW_IMAGES = 8  # a class with fewer has no covariance of its own
ALIKE = 1e-6  # least variance of a feature, as a share of its mean square


@dataclass(frozen=True)
class Moments:
    """First and second moments of a mixture's classes, over all their clients together.

    Attributes:
        means: mu, (C, d).
        rows: per class, (R, d); rows^T rows is its covariance but for the remainders that clients
            sent as diagonals.
        within: the mean covariance of the classes, remainders included, (d, d).
    """

    means: F64
    rows: tuple[F64, ...]
    within: F64

    @classmethod
    def of(cls, mixture: Mixture) -> Moments:
        """Compute them; a class's covariance is that of the images of all its clients together.

        What a mixture lends to a client with one image is for drawing features, and not used here.
        """
        means = np.stack([mixture.mean(c) for c in mixture.classes])  # (C, d)
        rows: list[F64] = []
        rest: F64 = np.zeros(means.shape[1])
        for omega, pi, mean, own in zip(
            mixture.omega, mixture.pi, means, mixture.gaussians, strict=True
        ):
            parts = []
            for share, gaussian in zip(pi, own, strict=True):
                parts.append(np.sqrt(share) * (gaussian.mean - mean)[None])  # (1, d)
                if gaussian.count == 1:
                    continue  # its distance from the mean is its whole part of the covariance
                parts.append(np.sqrt(share) * gaussian.factor)
                rest = rest + float(omega * share) * gaussian.rest.astype(np.float64)
            rows.append(np.concatenate(parts).astype(np.float64))
        stacked = np.concatenate(
            [np.sqrt(omega) * own for omega, own in zip(mixture.omega, rows, strict=True)]
        )
        return cls(means, tuple(rows), stacked.T @ stacked + np.diag(rest))

    @property
    def size(self) -> float:
        """The mean variance of a feature, tr(S) / d, and at least a trace of the means' squares.

        Images that are all alike have none; their posteriors must fit float32 nevertheless.
        """
        mean = float(np.trace(self.within)) / len(self.within)
        least = ALIKE * float(np.square(self.means).mean())
        return max(mean, least, float(np.finfo(np.float32).tiny))


def linear_discriminant(mixture: Mixture, shrinkage: float) -> tuple[F64, F64]:
    """Return weights (C, d) and biases (C,) whose logits are log posteriors up to a constant.

    All classes share the covariance within classes, S: w_c = P mu_c and b_c = log omega_c - mu_c P
    mu_c / 2 with P the inverse of (1 - e) S + e tr(S) / d I.

    Args:
        mixture: of at least one class.
        shrinkage: e.
    """
    found = Moments.of(mixture)
    shared = (1 - shrinkage) * found.within + shrinkage * found.size * np.eye(len(found.within))
    weights = np.asarray(np.linalg.solve(shared, found.means.T).T, dtype=np.float64)
    biases: F64 = np.log(mixture.omega) - 0.5 * (weights * found.means).sum(axis=1)
    return weights, biases


@dataclass(frozen=True)
class Quadratic:
    """A quadratic discriminant: ``w_c x + b_c + |T_c x - t_c|^2 / 2``.

    Attributes:
        weight: (C, d).
        bias: (C,).
        turn: T, (C, r, d); zero rows where a class has fewer directions.
        offset: t, (C, r).
    """

    weight: F64
    bias: F64
    turn: F64
    offset: F64


def quadratic_discriminant(
    mixture: Mixture, rank: int, shares: tuple[float, float, float]
) -> Quadratic:
    """Return the log posteriors of Gaussians of regularised covariances, up to a constant.

    A class's covariance is ``a1 U_c diag(l_c) U_c^T + B`` with its r largest directions and
    ``B = a2 S + a3 tr(S) / d I``, which all share: by Woodbury's identity one matrix (d, d) is
    inverted, and r x r for each class. After LR-RGDA (Low-Rank Regularised Gaussian Discriminant
    Analysis), with the identity in units of S.

    Args:
        mixture: of at least one class.
        rank: r, the largest number of a class's own directions.
        shares: a1, a2 and a3; a class of fewer than `FEW_IMAGES` images has a1 = 0.
    """
    found = Moments.of(mixture)
    C, d = found.means.shape
    own_share, pooled_share, identity_share = shares
    shared = pooled_share * found.within + identity_share * found.size * np.eye(d)
    inverse = np.linalg.inv(shared)  # (d, d)
    weight = found.means @ inverse
    bias = np.log(mixture.omega) - 0.5 * (weight * found.means).sum(axis=1)
    turn, offset = np.zeros((C, rank, d)), np.zeros((C, rank))
    for c, (rows, gaussians) in enumerate(zip(found.rows, mixture.gaussians, strict=True)):
        images = sum(g.count for g in gaussians)
        directions = own_directions(rows, min(rank, images - 1)) if images >= FEW_IMAGES else None
        if directions is None or not len(directions):
            continue
        scaled = np.sqrt(own_share) * directions  # U'^T, (q, d)
        root = np.linalg.cholesky(np.eye(len(scaled)) + scaled @ inverse @ scaled.T)  # (q, q)
        own = np.linalg.solve(root, scaled @ inverse)  # (q, d)
        turn[c, : len(own)], offset[c, : len(own)] = own, own @ found.means[c]
        bias[c] -= np.log(np.diag(root)).sum()
    return Quadratic(weight, bias, turn, offset)


def quadratic_tensors(h: QuadraticHparams, mixture: Mixture | None, d: int) -> dict[str, Array]:
    """Return the tensors of `discriminant_head.quadratic_specs` for the mixture's classes.

    Args:
        h: the method's options.
        mixture: of the described classes; None: there are none yet.
        d: width of a feature.
    """
    if mixture is None or not mixture.classes:
        found = Quadratic(
            np.zeros((0, d)), np.zeros(0), np.zeros((0, h.own_rank, d)), np.zeros((0, h.own_rank))
        )
    else:
        found = quadratic_discriminant(mixture, h.own_rank, h.shares)
    return {
        "weight": found.weight.astype(np.float32),
        "bias": found.bias.astype(np.float32),
        "classes": np.asarray(mixture.classes if mixture else (), dtype=np.int64),
        "turn": found.turn.astype(np.float32),
        "offset": found.offset.astype(np.float32),
    }


def own_directions(rows: F64, most: int) -> F64:
    """Return ``diag(sqrt(l)) U^T`` (q, d) of the largest eigenvalues of rows^T rows, q <= most.

    The largest number of each direction is positive, so that the order of the rows, and of the
    clients, does not decide its sign.
    """
    _, lengths, turned = np.linalg.svd(rows, full_matrices=False)
    largest = np.take_along_axis(turned, np.abs(turned).argmax(axis=1)[:, None], axis=1)
    turned = turned * np.where(largest < 0, -1.0, 1.0)
    kept = lengths[:most] > 0
    directions: F64 = (lengths[:, None] * turned)[:most][kept]
    return directions
