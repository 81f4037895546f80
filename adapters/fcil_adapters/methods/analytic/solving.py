"""From sums to the ridge classifier, in closed form and float64 (torch-free)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.methods.analytic.sums import F64, Sums, unpack_triangle

I64 = NDArray[np.int64]

_TINY = np.finfo(np.float64).tiny


def solve(h: AnalyticHparams, sums: Sums) -> tuple[I64, F64]:
    """Return the classes of which there are images (C,), and their rows (C, D).

    W = S (G + lambda I)^-1, lambda = rho tr(G) / D; with ``balance = "server"`` each row of S is
    divided by its class's images, which favours no frequent class and stays additive.
    """
    known = sums.counts > 0
    classes, targets = sums.classes[known], sums.sums[known]
    if h.balance == "server":
        targets = targets / sums.counts[known][:, None]
    if not len(classes):
        return classes, targets
    gram = unpack_triangle(sums.triangle, targets.shape[1])
    return classes, ridge(gram, targets, h.rho)


def ridge(gram: F64, targets: F64, rho: float) -> F64:
    """Return targets (C, D) times (gram + lambda I)^-1, lambda = rho tr(gram) / D."""
    width = len(gram)
    penalty = max(rho * float(np.trace(gram)) / width, _TINY)
    padded = gram + penalty * np.eye(width)
    try:
        np.linalg.cholesky(padded)
    except np.linalg.LinAlgError:
        # Noise for privacy can make the products of features what no products are.
        values, vectors = np.linalg.eigh(gram)
        inverse = 1 / np.maximum(np.maximum(values, 0) + penalty, _TINY)
        projected: F64 = (targets @ vectors * inverse) @ vectors.T
        return projected
    return np.linalg.solve(padded, targets.T).T.astype(np.float64)
