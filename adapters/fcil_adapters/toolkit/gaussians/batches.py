"""Many Gaussians at once, on the server's device: square roots, averages, samples (torch).

Gaussians are kept one by one in float32, with factors of different heights (`gaussian`). What
is computed of them is computed for many in one operation and in float64, in batches that
bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.gaussians.gaussian import (
    F32,
    I64,
    Covariance,
    Floats,
    Gaussian,
    factor_rows,
    is_triangle,
)
from fcil_protocol.payloads.payload import Payload

# Eigenvalues below this share of the largest are rounding errors of the transport.
_SMALLEST_SHARE = 1e-12
# Numbers in the largest tensor of a batch: a square root's are 128 MiB in float64; more than
# 8 MiB of samples at a time are slower on a CPU.
_ROOT_NUMBERS = 1 << 24
_SAMPLE_NUMBERS = 1 << 20


def unpack_gaussians(
    payload: Payload,
    counts: Sequence[int],
    covariance: Covariance,
    rank: int,
    device: str = "cpu",
) -> list[Gaussian]:
    """Read the Gaussians of E classes with these image counts; the reverse of packing.

    A triangle is made symmetric by construction, and negative eigenvalues are cut off
    (`square_roots`).
    """
    # Copies: views would keep the client's entire update in memory.
    means = payload.f32("gauss.mean").copy()
    d = means.shape[1]
    none = np.zeros((0, d), dtype=np.float32)
    rests = np.zeros_like(means)
    if covariance != "full":
        rests = np.maximum(payload.f32("gauss.rest"), 0)
    factors = payload.f32("gauss.factor").copy() if covariance != "diag" else none
    roots: list[F32] = []
    if covariance == "full":
        triangles = payload.f32("gauss.triangle")  # (T, d (d + 1) / 2)
        for some in _split(np.arange(len(triangles)), d * d, _ROOT_NUMBERS):
            roots += square_roots(_symmetric(to_torch(triangles[some], device), d))
    gaussians, row, tall = [], 0, iter(roots)
    for count, mean, rest in zip(counts, means, rests, strict=True):
        rows = factor_rows(count, d, covariance, rank)
        factor = next(tall) if is_triangle(count, d, covariance) else factors[row : row + rows]
        row += rows
        gaussians.append(Gaussian(count, mean, factor, rest))
    return gaussians


def square_roots(covariances: Tensor) -> list[F32]:
    """Return F (r, d) with F^T F = S for each S of (T, d, d); negative eigenvalues count as 0.

    By eigh in float64: a Cholesky factor does not exist for fewer than d images.
    """
    wide = covariances.double()
    values, vectors = torch.linalg.eigh((wide + wide.mT) / 2)  # (T, d) ascending, (T, d, d)
    largest = values[:, -1:].clamp_min(0)
    kept = (values > _SMALLEST_SHARE * largest).cpu().numpy()
    factors = to_numpy(values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT)  # (T, d, d)
    return [factor[rows] for factor, rows in zip(factors, kept, strict=True)]


def pooled_covariances(
    groups: Sequence[Sequence[Gaussian]],
    device: str = "cpu",
    weights: Sequence[NDArray[np.float64]] | None = None,
) -> list[tuple[Floats, Floats]]:
    """Return factor and rest of the average covariance of each group.

    Weights are given for each group and sum to 1; without them the image counts decide.
    The factors below each other are a factor of the sum; one with more than d rows is
    replaced by a square root.
    """
    if not groups:
        return []
    if weights is None:
        counts = [np.array([g.count for g in group], dtype=np.float64) for group in groups]
        weights = [n / n.sum() for n in counts]
    pooled = [_weighted(group, own) for group, own in zip(groups, weights, strict=True)]
    d = pooled[0][0].shape[1]
    tall = [i for i, (factor, _) in enumerate(pooled) if len(factor) > d]
    for some in _split(np.array(tall, dtype=np.int64), d * d, _ROOT_NUMBERS):
        factors = (to_torch(pooled[i][0], device, torch.float64) for i in some.tolist())
        roots = square_roots(torch.stack([factor.T @ factor for factor in factors]))
        for i, root in zip(some.tolist(), roots, strict=True):
            pooled[i] = (root, pooled[i][1])
    return pooled


def sample_gaussians(
    gaussians: Sequence[Gaussian], counts: I64, scale: float, draws: Generator, device: str = "cpu"
) -> Tensor:
    """Draw ``mean + sqrt(scale) (F^T a + sqrt(rest) b)`` with standard normal a and b.

    Args:
        gaussians: E of them.
        counts: (E,), how many to draw of each; N in all.
        scale: s, the factor of the covariances.
        draws: a CPU generator, so that devices agree; the only source.
        device: where to compute.

    Returns:
        (N, d) float32 on the device, in the order of the Gaussians.
    """
    d = len(gaussians[0].mean)
    starts = np.cumsum(counts) - counts  # (E,)
    samples = torch.empty(int(counts.sum()), d, device=device)
    for some in _alike(gaussians, counts):
        chosen = [gaussians[i] for i in some.tolist()]
        n = counts[some]  # (G,)
        factors = _padded([g.factor for g in chosen], device)  # (G, r, d)
        means, rests = (
            to_torch(np.stack(rows), device, torch.float64)  # (G, d)
            for rows in ([g.mean for g in chosen], [g.rest for g in chosen])
        )
        steps = np.arange(n.max())
        wanted = steps < n[:, None]  # (G, max n)
        a = _normal((*wanted.shape, factors.shape[1]), draws, device)
        noise = (a @ factors)[to_torch(wanted, device)]  # (M, d)
        owner = to_torch(np.repeat(np.arange(len(n)), n), device)  # (M,)
        if rests.any():
            noise += _normal(tuple(noise.shape), draws, device) * rests.sqrt()[owner]
        rows = to_torch((starts[some][:, None] + steps)[wanted], device)  # (M,)
        samples[rows] = (means[owner] + scale**0.5 * noise).float()
    return samples


def _alike(gaussians: Sequence[Gaussian], counts: I64) -> Iterator[I64]:
    """Yield batches of Gaussians whose heights and counts differ by less than a factor of two.

    So padding at most doubles each, and the number of batches does not grow with E alone.
    """

    def size(i: int) -> tuple[int, int]:
        return len(gaussians[i].factor).bit_length(), int(counts[i]).bit_length()

    for (rows, draws), group in groupby(sorted(np.flatnonzero(counts).tolist(), key=size), size):
        largest = max(1 << rows, 1 << draws) * len(gaussians[0].mean)
        yield from _split(np.array(list(group), dtype=np.int64), largest, _SAMPLE_NUMBERS)


def _split(indices: I64, each: int, most: int) -> Iterator[I64]:
    """Cut indices into batches of at most ``most`` numbers, if each stands for ``each``."""
    size = max(most // each, 1)
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _weighted(group: Sequence[Gaussian], weights: NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Return the factors (R, d), each scaled by its weight's root, and the average rest (d,)."""
    rows = [np.sqrt(w) * g.factor for w, g in zip(weights, group, strict=True)]
    rest = weights @ np.stack([g.rest for g in group])
    return np.concatenate(rows), rest


def _symmetric(triangles: Tensor, d: int) -> Tensor:
    """Return the matrices (T, d, d) of upper triangles (T, d (d + 1) / 2), in float64."""
    dense = triangles.new_zeros((len(triangles), d, d), dtype=torch.float64)
    row, column = torch.triu_indices(d, d, device=triangles.device)
    dense[:, row, column] = triangles.double()
    return dense + dense.triu(1).mT


def _padded(factors: Sequence[NDArray[np.floating]], device: str) -> Tensor:
    """Stack factors (r_g, d) of different heights with rows of zeros: (G, r, d) in float64."""
    stack = np.zeros((len(factors), max(map(len, factors)), factors[0].shape[1]))
    for place, factor in zip(stack, factors, strict=True):
        place[: len(factor)] = factor
    return to_torch(stack, device)


def _normal(shape: tuple[int, ...], draws: Generator, device: str) -> Tensor:
    """Draw from N(0, 1) in float32, which is five times as fast, and return it in float64."""
    return torch.randn(shape, generator=draws).to(device, torch.float64)
