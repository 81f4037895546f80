"""Gaussians of class features: from features to a few rows, to a payload, and to a state.

Torch-free; `gaussians.batches` has the server's computations. Tensors that were received or kept in
float32 stay so until they are used, since a server holds those of all clients and classes. Every
covariance is held as ``F^T F + diag(rest)`` with a factor F (r, d): all forms that may travel
become this one, and samples need nothing else. The number of rows of a class follows from its image
count alone (`factor_rows`, `is_triangle`), so no second statement about sizes could contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.numerics.symmetric import (
    leading_factor,
    leading_factor_of,
    pack_triangle,
    triangle_size,
)
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, TensorSpec

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Floats = NDArray[np.floating]  # float64, or float32 as it travels
I64 = NDArray[np.int64]
Covariance = Literal["lowrank", "full", "diag"]


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
    mean: Floats
    factor: Floats
    rest: Floats

    def covariance(self) -> F64:
        """Return the dense covariance (d, d)."""
        factor = self.factor.astype(np.float64)
        return factor.T @ factor + np.diag(self.rest)


class Described(Protocol):
    """The options of a method that determine what clients send of a class."""

    @property
    def cov(self) -> Covariance:
        """The form of a covariance."""
        ...

    @property
    def cov_rank(self) -> int:
        """Eigenvalues that ``lowrank`` keeps."""
        ...

    @property
    def min_count_upload(self) -> int:
        """Least number of images for which a client sends a class."""
        ...


def describe(features: NDArray[Any], covariance: Covariance, rank: int) -> Gaussian:
    """Summarise the features of one class.

    Args:
        features: (n, d), n >= 1.
        covariance: ``full``: the unbiased covariance; ``lowrank``: its ``rank`` largest eigenvalues
            and the diagonal of the rest; ``diag``: its diagonal.
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
    # Up to n - 1 rows are the entire covariance; the difference is then only rounding.
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
    """Return True if a class of ``count`` images sends its covariance's upper triangle."""
    return covariance == "full" and count - 1 > max_factor_rows(d)


def max_factor_rows(d: int) -> int:
    """Return the largest number of rows for which r d <= d (d + 1) / 2."""
    return (d + 1) // 2


def pack_gaussians(gaussians: Sequence[Gaussian], d: int, covariance: Covariance) -> dict[str, F32]:
    """Return the tensors that describe E Gaussians; `gaussians.batches` unpacks them.

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
        triangles = [pack_triangle(g.covariance()) for g in tall]
        tensors["gauss.triangle"] = _stack(triangles, triangle_size(d))
    return tensors


def gaussian_specs(form: Covariance, rows: str = "rows") -> tuple[TensorSpec, ...]:
    """Return the specs of the Gaussians that a client sends for classes with enough images.

    Symbols: ``owned`` such classes, ``rows`` (or as given) of all their factors, ``tall`` classes
    that send a triangle of ``triangle`` numbers instead, features of ``d``.
    """
    mean, rest, factor, triangle = (
        TensorSpec(f"gauss.{name}", Kind.GAUSSIAN, shape)
        for name, shape in (
            ("mean", ("owned", "d")),
            ("rest", ("owned", "d")),
            ("factor", (rows, "d")),
            ("triangle", ("tall", "triangle")),
        )
    )
    if form == "diag":
        return (mean, rest)
    return (mean, rest, factor) if form == "lowrank" else (mean, factor, triangle)


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


def store_gaussians(gaussians: Sequence[Gaussian], d: int) -> dict[str, Array]:
    """Return the tensors by which a server keeps E Gaussians, independent of the received form.

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
    """Read the tensors of `store_gaussians`."""
    means, rests, factors = (
        np.asarray(tensors[n], dtype=np.float32) for n in ("mean", "rest", "factor")
    )
    rows = np.asarray(tensors["rows"], dtype=np.int64)
    blocks = np.split(factors, np.cumsum(rows)[:-1]) if len(rows) else []
    counts = np.asarray(tensors["count"], dtype=np.int64).tolist()
    return [
        Gaussian(n, mean, block, rest)
        for n, mean, block, rest in zip(counts, means, blocks, rests, strict=True)
    ]


def _leading_factor(scaled: F64, rows: int) -> F64:
    """Return F (rows, d), F^T F the best approximation of scaled^T scaled of that rank."""
    n, d = scaled.shape
    if rows == 0:
        return np.zeros((0, d))
    if n <= d:
        return leading_factor(scaled, rows)
    return leading_factor_of(scaled.T @ scaled, rows)


def _stack(rows: Sequence[Floats], width: int) -> F32:
    if not rows:
        return np.zeros((0, width), np.float32)
    return np.stack(rows, dtype=np.float32, casting="same_kind")


def _concatenate(blocks: Sequence[Floats], width: int) -> F32:
    none = np.zeros((0, width), np.float32)
    return np.concatenate([none, *blocks], dtype=np.float32, casting="same_kind")
