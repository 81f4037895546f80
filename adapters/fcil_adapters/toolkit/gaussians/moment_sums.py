"""Reports of Gaussians as sums, for heads that need a class's mean and covariance (torch-free).

A client sends n_k, n_k mean_k and n_k (cov_k + mean_k mean_k^T). Their sums give the mean and the
covariance of all images of a class together, which is all that `discriminants.Moments` reads of a
mixture. Single Gaussians are lost, so a head that draws features would draw others. A client with
one image of a class adds no covariance, in a mixture neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fcil_adapters.contract.averaging import Additive, Sums, SumSpec
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.symmetric import (
    leading_factor_of,
    pack_triangle,
    triangle_size,
    unpack_triangle,
)
from fcil_adapters.numerics.weighted_sums import COUNT, count_sum
from fcil_adapters.toolkit.gaussians.gaussian import (
    F64,
    Described,
    Gaussian,
    factor_rows,
    is_triangle,
    pack_gaussians,
)
from fcil_protocol.payloads.payload import Payload

_MEAN, _SQUARES = "gauss.mean", "gauss.squares"
_SPECS = (  # features up to 2^7 and their products up to 2^14, of 2^26 images
    SumSpec(_MEAN, ("c", "d"), bits=28, bound=2.0**34),
    SumSpec(_SQUARES, ("c", "triangle"), bits=22, bound=2.0**40),
    count_sum(COUNT, "c"),
)


def moment_sums(h: Described) -> Additive | None:
    """Return the sums of reports; None unless ``cov`` is ``full``: clients cut other covariances.

    The sums have a row for each class of the task, zero where a client does not describe it.
    """
    if h.cov != "full":
        return None

    def read(payload: Payload) -> dict[str, F64]:
        reported = payload.i64("count")
        rows = np.flatnonzero(reported >= h.min_count_upload)
        means = payload.f32(_MEAN).astype(np.float64)
        squares = _covariances(payload, reported[rows].tolist()) + _products(means)
        counts = np.zeros(len(reported))
        counts[rows] = reported[rows]
        sums = {COUNT: counts}
        for name, values in ((_MEAN, means), (_SQUARES, squares)):
            sums[name] = np.zeros((len(reported), values.shape[1]))
            sums[name][rows] = counts[rows, None] * values
        return sums

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        counts = np.rint(sums[COUNT]).astype(np.int64)
        known = np.flatnonzero(counts)
        images = counts[known, None]
        means = sums[_MEAN][known] / images
        covariances = sums[_SQUARES][known] / images - _products(means)
        gaussians = [
            _gaussian(n, mean, covariance)
            for n, mean, covariance in zip(counts[known].tolist(), means, covariances, strict=True)
        ]
        d = sums[_MEAN].shape[1]
        return Payload({**pack_gaussians(gaussians, d, "full"), **tally(classes, counts)})

    return Additive(_SPECS, read, write)


def _covariances(payload: Payload, counts: Sequence[int]) -> F64:
    """Return the covariances of the described classes as upper triangles."""
    d = payload.tensors[_MEAN].shape[1]
    triangles = iter(payload.f32("gauss.triangle").astype(np.float64))
    factors = payload.f32("gauss.factor").astype(np.float64)
    found = np.zeros((len(counts), triangle_size(d)))
    row = 0
    for own, count in zip(found, counts, strict=True):
        if is_triangle(count, d, "full"):
            own[:] = next(triangles)
            continue
        rows = factor_rows(count, d, "full", 0)
        factor = factors[row : row + rows]
        own[:] = pack_triangle(factor.T @ factor)
        row += rows
    return found


def _products(means: F64) -> F64:
    """Return mean mean^T of each row (E, d) as upper triangles."""
    products = [pack_triangle(np.outer(mean, mean)) for mean in means]
    return np.reshape(products, (len(means), triangle_size(means.shape[1])))


def _gaussian(count: int, mean: F64, covariance: F64) -> Gaussian:
    """Return the Gaussian of all images of a class; the covariance is an upper triangle."""
    d = len(mean)
    rows = d if is_triangle(count, d, "full") else factor_rows(count, d, "full", 0)
    return Gaussian(
        count, mean, leading_factor_of(unpack_triangle(covariance, d), rows), np.zeros(d)
    )
