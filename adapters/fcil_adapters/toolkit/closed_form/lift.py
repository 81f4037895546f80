"""Map from a backbone's feature to the linear classifier's input (torch-free).

McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel, RanPAC: Random Projections and Pre-trained
Models for Continual Learning, NeurIPS 2023, https://arxiv.org/abs/2307.02251.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Payload
from fcil_adapters.numerics.scores import unit_rows
from fcil_adapters.numerics.task_parts import find_part
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

Lift = Callable[[NDArray[Any]], F64]  # features (B, d) -> phi (B, D)

SEED_WORDS = 4
PROJECTION = "projection"  # the part with the seed of the random projection


def read_seed(broadcast: Mapping[str, Payload]) -> I64:
    """Return the numbers that determine the projection.

    Raises:
        SchemaMismatch: their part is missing.
    """
    return find_part(broadcast, PROJECTION).i64("seed")


def make_lift(h: AnalyticHparams, d: int, seed: I64) -> Lift:
    """Return the map from features (B, d) to phi (B, D), in float64.

    Args:
        h: kind and width of the map.
        d: width of the backbone's features.
        seed: `SEED_WORDS` whole numbers >= 0, the server's; they determine the projection.
    """
    matrices = lift_matrices(h, d, seed)

    def lift(features: NDArray[Any]) -> F64:
        rows: F64 = unit_rows(features.astype(np.float64))
        parts = [] if h.features == "relu_projection" else [rows]
        parts += [projected(rows, matrix) for matrix in matrices]
        return np.concatenate(parts, axis=1)

    return lift


def lift_matrices(h: AnalyticHparams, d: int, seed: I64) -> tuple[F64, ...]:
    """Return the random projection (d, `projection`), if the features need it."""
    return () if h.features == "linear" else (projection(seed, d, h.projection),)


def projected(rows: Any, matrix: Any) -> Any:
    """Return ``relu(rows R)`` of rows (B, d), arrays or tensors (`numerics.scores`)."""
    return (rows @ matrix).clip(0.0)


def projection(seed: I64, d: int, width: int) -> F64:
    """Return the random projection (d, D), the same numbers on every machine.

    An entry is a binomial number, from the set bits of 64 random ones: near enough to normal, and
    made of whole numbers alone, so it depends on no machine's logarithm or cosine. Its variance is
    2 / D, so that phi of a feature of length 1 has length 1 on average.
    """
    words = np.random.PCG64(np.random.SeedSequence(seed.tolist())).random_raw(d * width)
    heads = np.bitwise_count(words).astype(np.float64)  # mean 32, variance 16
    matrix: F64 = (heads.reshape(d, width) - 32) / 4 * np.sqrt(2 / width)
    return matrix
