"""Gaussians of class features: from features to a few rows, to a payload, and to samples.

Torch-free; float64 inside. Every covariance is held as ``F^T F + diag(rest)`` with a factor
F (r, d): all forms that may travel become this one, and samples need nothing else. How many
rows a class sends follows from its image count alone (`factor_rows`, `is_triangle`), so
there is no second statement about sizes that could contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Covariance = Literal["lowrank", "full", "diag"]

# Eigenvalues below this share of the largest are rounding errors of the transport.
_SMALLEST_SHARE = 1e-12


@dataclass(frozen=True)
class Gaussian:
    """Features of one class on one client: N(mean, F^T F + diag(rest)).

    Attributes:
        count: images behind it; with one image there is no covariance (no rows, rest zero).
        mean: (d,).
        factor: F, (r, d).
        rest: (d,), >= 0.
    """

    count: int
    mean: F64
    factor: F64
    rest: F64

    def covariance(self) -> F64:
        """Return the dense covariance (d, d)."""
        return self.factor.T @ self.factor + np.diag(self.rest)


def describe(features: NDArray[Any], covariance: Covariance, rank: int) -> Gaussian:
    """Summarise the features of one class.

    Args:
        features: (n, d), n >= 1.
        covariance: ``full``: the unbiased covariance; ``lowrank``: its ``rank`` largest
            eigenvalues and, of what is left, the diagonal; ``diag``: its diagonal.
        rank: q of ``lowrank``.
    """
    x = features.astype(np.float64)
    n, d = x.shape
    mean: F64 = x.mean(axis=0)
    scaled: F64 = (x - mean) / np.sqrt(max(n - 1, 1))  # scaled^T scaled is the covariance
    rows = min(n - 1, d) if covariance == "full" else factor_rows(n, d, covariance, rank)
    factor = _leading_factor(scaled, rows)
    if covariance == "full":
        return Gaussian(n, mean, factor, np.zeros(d))
    rest = np.square(scaled).sum(axis=0) - np.square(factor).sum(axis=0)  # (d,)
    # Up to n - 1 rows are the whole covariance; what the difference then shows is rounding.
    exact = rows == min(n - 1, d)
    return Gaussian(n, mean, factor, np.zeros(d) if exact else np.maximum(rest, 0))


def factor_rows(count: int, d: int, covariance: Covariance, rank: int) -> int:
    """Return how many factor rows a class of ``count`` images sends.

    ``full`` sends its exact factor (count - 1 rows) while that is no larger than the
    triangle of the covariance, and none beyond (`is_triangle`).
    """
    if covariance == "diag":
        return 0
    if covariance == "lowrank":
        return min(rank, count - 1, d)
    return 0 if is_triangle(count, d, covariance) else count - 1


def is_triangle(count: int, d: int, covariance: Covariance) -> bool:
    """Say whether a class of ``count`` images sends its covariance's upper triangle."""
    return covariance == "full" and count - 1 > max_factor_rows(d)


def max_factor_rows(d: int) -> int:
    """Return the largest number of rows for which r d <= d (d + 1) / 2."""
    return (d + 1) // 2


def triangle_size(d: int) -> int:
    """Return the number of entries of an upper triangle with its diagonal."""
    return d * (d + 1) // 2


def pack_gaussians(gaussians: Sequence[Gaussian], d: int, covariance: Covariance) -> dict[str, F32]:
    """Return the tensors that describe E Gaussians.

    Returns:
        ``gauss.mean`` (E, d); ``gauss.rest`` (E, d) unless ``full``; ``gauss.factor`` (R, d)
        unless ``diag``, the rows of all classes below each other; ``gauss.triangle``
        (classes that send one, d (d + 1) / 2) for ``full``.
    """
    tall = [g for g in gaussians if is_triangle(g.count, d, covariance)]
    short = [g for g in gaussians if not is_triangle(g.count, d, covariance)]
    tensors = {"gauss.mean": _stack([g.mean for g in gaussians], d)}
    if covariance != "full":
        tensors["gauss.rest"] = _stack([g.rest for g in gaussians], d)
    if covariance != "diag":
        tensors["gauss.factor"] = _concatenate([g.factor for g in short], d)
    if covariance == "full":
        upper = np.triu_indices(d)
        triangles = [g.covariance()[upper] for g in tall]
        tensors["gauss.triangle"] = _stack(triangles, triangle_size(d))
    return tensors


def unpack_gaussians(
    payload: Payload, counts: Sequence[int], covariance: Covariance, rank: int
) -> list[Gaussian]:
    """Read the Gaussians of E classes with these image counts; the reverse of packing.

    A triangle is made symmetric by construction, and what lies below zero in its spectrum
    is cut off (`square_root`).
    """
    means = payload.f32("gauss.mean").astype(np.float64)
    d = means.shape[1]
    zero = np.zeros(d)
    gaussians, row, triangle = [], 0, 0
    for e, count in enumerate(counts):
        rest = zero
        if covariance != "full":
            rest = np.maximum(payload.f32("gauss.rest")[e].astype(np.float64), 0)
        if is_triangle(count, d, covariance):
            factor = square_root(_symmetric(payload.f32("gauss.triangle")[triangle], d))
            triangle += 1
        elif covariance == "diag":
            factor = np.zeros((0, d))
        else:
            rows = factor_rows(count, d, covariance, rank)
            factor = payload.f32("gauss.factor")[row : row + rows].astype(np.float64)
            row += rows
        gaussians.append(Gaussian(count, means[e], factor, rest))
    return gaussians


def gaussian_faults(
    payload: Payload, counts: Sequence[int], covariance: Covariance, rank: int
) -> list[str]:
    """Return one sentence for every way in which packed Gaussians contradict the counts."""
    means = payload.f32("gauss.mean")
    d = means.shape[1]
    expected = {"gauss.mean": len(counts)}
    if covariance != "full":
        expected["gauss.rest"] = len(counts)
    if covariance != "diag":
        expected["gauss.factor"] = sum(factor_rows(n, d, covariance, rank) for n in counts)
    if covariance == "full":
        expected["gauss.triangle"] = sum(is_triangle(n, d, covariance) for n in counts)
    faults = [
        f"{name!r}: the counts ask for {rows} rows, got {len(payload.tensors[name])}"
        for name, rows in expected.items()
        if len(payload.tensors[name]) != rows
    ]
    if covariance != "full" and (payload.f32("gauss.rest") < 0).any():
        faults.append("'gauss.rest' holds a negative variance")
    return faults


def square_root(covariance: F64) -> F64:
    """Return F (r, d) with F^T F = covariance (d, d), its negative eigenvalues set to 0.

    By eigh: a Cholesky factor does not exist for fewer than d images.
    """
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    kept = values > _SMALLEST_SHARE * max(float(values[-1]), 0.0)
    kept &= values > 0
    factor: F64 = np.sqrt(values[kept])[:, None] * vectors[:, kept].T
    return factor


def pooled_covariance(gaussians: Sequence[Gaussian]) -> tuple[F64, F64]:
    """Return factor and rest of the count-weighted average covariance of some Gaussians."""
    counts = np.array([g.count for g in gaussians], dtype=np.float64)
    weights = counts / counts.sum()
    rows = [np.sqrt(w) * g.factor for w, g in zip(weights, gaussians, strict=True)]
    factor = np.concatenate(rows)
    if len(factor) > factor.shape[1]:
        factor = square_root(factor.T @ factor)
    rest: F64 = weights @ np.stack([g.rest for g in gaussians])
    return factor, rest


def sample_gaussian(gaussian: Gaussian, count: int, scale: float, rng: np.random.Generator) -> F64:
    """Draw ``mean + sqrt(scale) (F^T e + sqrt(rest) e')``: (count, d)."""
    r, d = gaussian.factor.shape
    noise: F64 = rng.standard_normal((count, r)) @ gaussian.factor
    if gaussian.rest.any():
        noise += rng.standard_normal((count, d)) * np.sqrt(gaussian.rest)
    samples: F64 = gaussian.mean + np.sqrt(scale) * noise
    return samples


def store_gaussians(gaussians: Sequence[Gaussian], d: int) -> dict[str, Array]:
    """Return the tensors by which a server keeps E Gaussians, whatever form they came in.

    Returns:
        ``count`` (E,), ``mean`` (E, d), ``rest`` (E, d), ``rows`` (E,), ``factor`` (R, d).
    """
    return {
        "count": np.array([g.count for g in gaussians], dtype=np.int64),
        "mean": _stack([g.mean for g in gaussians], d),
        "rest": _stack([g.rest for g in gaussians], d),
        "rows": np.array([len(g.factor) for g in gaussians], dtype=np.int64),
        "factor": _concatenate([g.factor for g in gaussians], d),
    }


def stored_gaussians(tensors: Mapping[str, Array]) -> list[Gaussian]:
    """Read what `store_gaussians` made."""
    means, rests, factors = (
        np.asarray(tensors[n], dtype=np.float64) for n in ("mean", "rest", "factor")
    )
    rows = np.asarray(tensors["rows"], dtype=np.int64)
    blocks = np.split(factors, np.cumsum(rows)[:-1]) if len(rows) else []
    counts = np.asarray(tensors["count"], dtype=np.int64).tolist()
    return [
        Gaussian(n, mean, block, rest)
        for n, mean, block, rest in zip(counts, means, blocks, rests, strict=True)
    ]


def _leading_factor(scaled: F64, rows: int) -> F64:
    """Return F (rows, d), F^T F the best approximation of scaled^T scaled of that rank.

    For few images the rows of ``scaled`` are turned by the eigenvectors of their Gram matrix:
    the sum of squares stays exact, and no row is an image's feature any more.
    """
    n, d = scaled.shape
    if rows == 0:
        return np.zeros((0, d))
    if n <= d:
        _, turn = np.linalg.eigh(scaled @ scaled.T)  # ascending
        turned: F64 = turn[:, ::-1][:, :rows].T @ scaled
        return turned
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    lengths = np.sqrt(np.maximum(values[::-1][:rows], 0))
    factor: F64 = lengths[:, None] * vectors[:, ::-1][:, :rows].T
    return factor


def _symmetric(triangle: F32, d: int) -> F64:
    dense = np.zeros((d, d))
    dense[np.triu_indices(d)] = triangle
    full: F64 = dense + np.triu(dense, 1).T
    return full


def _stack(rows: Sequence[F64], width: int) -> F32:
    return np.stack(rows).astype(np.float32) if rows else np.zeros((0, width), np.float32)


def _concatenate(blocks: Sequence[F64], width: int) -> F32:
    return np.concatenate([np.zeros((0, width)), *blocks]).astype(np.float32)
