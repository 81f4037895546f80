"""Sums of the analytic method: feature products, class sums, image counts (torch-free).

They are only ever added, so neither the split over clients, nor the order of tasks, nor a late
upload within a round matters; a client that misses a round is not in them. They are computed in
float64 and kept as two float32 for each number, the second being the rounding error of the first:
states hold nothing wider than 32 bits of mantissa, and rounding at each step would make the order
visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Array
from fcil_adapters.numerics.symmetric import triangle_size

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

LOW = ".low"  # names the second float32 of each number


@dataclass(frozen=True)
class ProductSums:
    """Sums over some images of some classes.

    Attributes:
        triangle: (D (D + 1) / 2,), the upper triangle of G = sum phi phi^T, row after row.
        classes: (m,) ids, ascending.
        sums: (m, D), the sum of phi of each class.
        counts: (m,), images of each class; a capped client's are lowered with its sums.
        observations: the number of rows whose products are in G: images, or groups of them.
    """

    triangle: F64
    classes: I64
    sums: F64
    counts: F64
    observations: float

    @classmethod
    def zero(cls, width: int) -> ProductSums:
        """Return the sums over no image; D is ``width``."""
        none = np.zeros((0, width))
        return cls(np.zeros(triangle_size(width)), np.zeros(0, np.int64), none, np.zeros(0), 0.0)

    def __add__(self, other: ProductSums) -> ProductSums:
        """Return the sums over the images of both."""
        classes = np.union1d(self.classes, other.classes)
        sums = np.zeros((len(classes), self.sums.shape[1]))
        counts = np.zeros(len(classes))
        for one in (self, other):
            rows = np.searchsorted(classes, one.classes)
            sums[rows] += one.sums
            counts[rows] += one.counts
        observations = self.observations + other.observations
        return ProductSums(self.triangle + other.triangle, classes, sums, counts, observations)

    def scaled(self, factor: float) -> ProductSums:
        """Return the sums of these images if each counts ``factor`` times."""
        return ProductSums(
            self.triangle * factor,
            self.classes,
            self.sums * factor,
            self.counts * factor,
            self.observations * factor,
        )

    def tensors(self, prefix: str) -> dict[str, Array]:
        """Return the tensors by which a state holds them."""
        named = {
            "triangle": self.triangle,
            "sum": self.sums,
            "count": self.counts,
            "observations": np.array([self.observations]),
        }
        pairs = {f"{prefix}.{name}": array for name, array in named.items()}
        return {**split(pairs), f"{prefix}.classes": self.classes}

    @classmethod
    def read(cls, tensors: Mapping[str, Array], prefix: str) -> ProductSums:
        """Read the result of `tensors`."""
        triangle, sums, counts, (observations,) = (
            joined(tensors, f"{prefix}.{name}")
            for name in ("triangle", "sum", "count", "observations")
        )
        classes = np.asarray(tensors[f"{prefix}.classes"], np.int64)
        return cls(triangle, classes, sums, counts, float(observations))


def split(arrays: Mapping[str, F64]) -> dict[str, Array]:
    """Return each array as a sum of two of float32, ``name`` and ``name.low``."""
    named: dict[str, Array] = {}
    for name, array in arrays.items():
        high = array.astype(np.float32)
        named[name], named[name + LOW] = high, (array - high).astype(np.float32)
    return named


def joined(tensors: Mapping[str, Array], name: str) -> F64:
    """Return an array that was sent as one or as two of float32."""
    high = np.asarray(tensors[name], dtype=np.float64)
    low = tensors.get(name + LOW)
    return high if low is None else high + np.asarray(low, dtype=np.float64)
