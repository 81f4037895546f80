"""From sums to the ridge classifier, in closed form and float64 (torch-free)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.methods.analytic.sums import F64, Sums, unpack_triangle

I64 = NDArray[np.int64]


def solve(h: AnalyticHparams, sums: Sums) -> tuple[I64, F64]:
    """Return the classes with images (C,), and their rows (C, D).

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
    """Return targets (C, D) times (gram + lambda I)^-1, lambda = rho tr(gram) / D.

    Noise for privacy can make the products of features indefinite: then negative eigenvalues count
    as zero, and only the others give lambda.
    """
    width = len(gram)
    penalty = rho * float(np.trace(gram)) / width
    try:
        # No eigenvalue is below -lambda / 2, so at least half of the ridge holds everywhere.
        np.linalg.cholesky(gram + penalty / 2 * np.eye(width))
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(gram)
        kept = np.maximum(values, 0)
        if not kept.any():
            return np.zeros_like(targets)
        projected: F64 = (targets @ vectors / (kept + rho * kept.mean())) @ vectors.T
        return projected
    return np.linalg.solve(gram + penalty * np.eye(width), targets.T).T.astype(np.float64)
