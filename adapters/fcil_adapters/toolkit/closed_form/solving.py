"""From sums to the classifier, in closed form and float64 (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcil_adapters.numerics.symmetric import unpack_triangle
from fcil_adapters.toolkit.closed_form.options import GCV, AnalyticHparams
from fcil_adapters.toolkit.closed_form.sums import F64, I64, ProductSums

GRID = 10.0 ** (np.arange(-24, 13) / 4)  # candidates for rho, 1e-6 to 1e3
MOST_FREEDOM = 0.9  # of the observations: beyond it the residuals are too few to judge by
_SMALLEST = 1e-9  # of the largest eigenvalue: below it a direction counts as empty


@dataclass(frozen=True)
class Classifier:
    """Scores ``W phi + b`` of the classes with images.

    Attributes:
        classes: (C,) ids.
        weight: (C, D).
        bias: (C,).
    """

    classes: I64
    weight: F64
    bias: F64


def solve(h: AnalyticHparams, sums: ProductSums) -> Classifier:
    """Return the classifier of the sums, in the form that the options choose."""
    known = sums.counts > 0
    classes, totals, counts = sums.classes[known], sums.sums[known], sums.counts[known]
    none = Classifier(classes, np.zeros_like(totals), np.zeros(len(classes)))
    if not len(classes):
        return none
    gram = unpack_triangle(sums.triangle, totals.shape[1])
    penalty = find_penalty(h.rho, gram, totals, sums.observations, float(counts.sum()))
    if not penalty > 0:
        return none
    if h.form == "ridge":
        targets = totals / counts[:, None] if h.balance == "server" else totals
        return Classifier(classes, targets @ inverse(gram, penalty), none.bias)
    corrects = h.prior == "counts"
    weight, bias = within(gram, totals, counts, penalty, sums.observations, corrects=corrects)
    return Classifier(classes, weight, bias)


def find_penalty(rho: str | float, gram: F64, totals: F64, rows: float, squares: float) -> float:
    """Return lambda: ``rho tr(G) / D``, with rho as given or by cross-validation.

    Noise for privacy can make G indefinite: then negative eigenvalues count as zero.

    Args:
        rho: a number, or ``gcv``.
        gram: G (D, D).
        totals: S (C, D), sums of the rows times their targets.
        rows: n, how many rows are in G.
        squares: the sum of the targets' squares: the number of images.
    """
    if rho != GCV:
        mean = float(np.trace(gram)) / len(gram)
        if not _is_positive(gram, float(rho) * mean / 2):
            mean = float(np.maximum(np.linalg.eigvalsh(gram), 0).mean())
        return float(rho) * mean
    values, vectors = np.linalg.eigh(gram)
    kept = np.maximum(values, 0)
    best = choose_rho(kept, np.square(totals @ vectors).sum(axis=0), rows, squares)
    # Noise that makes eigenvalues as low as this makes others as high by as much.
    return max(best * float(kept.mean()), float(-values[0]))


def choose_rho(values: F64, along: F64, rows: float, squares: float) -> float:
    """Return the rho on `GRID` of the least cross-validation score, of equal ones the largest.

    The arguments are those of `cross_validation`; without an allowed candidate it is the largest.
    """
    scores = cross_validation(values, along, rows, squares)
    return float(GRID[len(GRID) - 1 - int(np.argmin(scores[::-1]))])


def cross_validation(values: F64, along: F64, rows: float, squares: float) -> F64:
    """Return the score of each rho on `GRID` for the regression on one-hot targets, (R,).

    ``GCV = (RSS / n) / (1 - dof / n)^2`` (Golub, Heath, Wahba, Technometrics 21(2), 1979); infinity
    where dof is above `MOST_FREEDOM` of n. RSS is the sum of what no ridge can explain and what
    this one does not; the usual difference of large numbers cancels where n is near D.

    Args:
        values: g, eigenvalues of G, none negative, (D,).
        along: q, the sum over classes of the squares of S along the eigenvectors, (D,).
        rows: n, how many rows are in G.
        squares: the sum of the targets' squares.
    """
    live = values > _SMALLEST * values.max(initial=0.0)
    g, q = values[live], along[live]
    if not len(g):
        return np.full(len(GRID), np.inf)
    penalties = GRID[:, None] * values.mean()  # (R, 1)
    freedom = (g / (g + penalties)).sum(axis=1)  # (R,)
    unexplained = max(squares - float((q / g).sum()), 0.0)
    residuals = unexplained + (q / g * (penalties / (g + penalties)) ** 2).sum(axis=1)
    share = np.minimum(freedom / rows, MOST_FREEDOM)
    return np.where(freedom <= MOST_FREEDOM * rows, residuals / rows / (1 - share) ** 2, np.inf)


def within(
    gram: F64, totals: F64, counts: F64, penalty: float, rows: float, *, corrects: bool
) -> tuple[F64, F64]:
    """Return rows (C, D) and biases (C,) from the scatter within the classes.

    ``w_c = nu (Sw + lambda I)^-1 mu_c`` and ``b_c = -w_c mu_c / 2``: log-posteriors of Gaussians
    with one covariance, up to a constant; for lambda to infinity the nearest class mean.

    Args:
        gram: G (D, D).
        totals: S (C, D).
        counts: N (C,), images of each class, all above zero.
        penalty: lambda.
        rows: n, how many rows are in G.
        corrects: add ``dof / (2 N_c) + log N_c``: the mean of few images lies off by chance, and a
            rare class is less likely.
    """
    means = totals / counts[:, None]
    scatter = gram - totals.T @ means
    solved = inverse(scatter, penalty)
    degrees = rows - len(counts)
    weight = means @ solved * max(degrees, 1.0)
    bias = -(weight * means).sum(axis=1) / 2
    if corrects and degrees > 0:
        freedom = len(gram) - penalty * float(np.trace(solved))
        bias = bias + freedom / (2 * counts) + np.log(counts)
    return weight, bias


def inverse(square: F64, penalty: float) -> F64:
    """Return the inverse of a symmetric matrix (D, D) plus lambda I.

    Negative eigenvalues count as zero, unless they are so small that at least half of lambda holds
    everywhere.
    """
    if _is_positive(square, penalty / 2):
        return np.asarray(np.linalg.inv(square + penalty * np.eye(len(square))), dtype=np.float64)
    values, vectors = np.linalg.eigh(square)
    return np.asarray((vectors / (np.maximum(values, 0) + penalty)) @ vectors.T, dtype=np.float64)


def _is_positive(square: F64, more: float) -> bool:
    try:
        np.linalg.cholesky(square + more * np.eye(len(square)))
    except np.linalg.LinAlgError:
        return False
    return True
