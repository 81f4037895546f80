"""The two tiers of HGP's generative prototypes: clients within a class, classes (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.arrays import sample_weights
from fcil_adapters.gaussians import Gaussian, pooled_covariance, sample_gaussian
from fcil_adapters.methods.hgp.store import Entry

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# Variance where no client has two images of any class of a task.
_LAST_RESORT = 1e-4


@dataclass(frozen=True)
class Mixture:
    """``Q = sum_c omega_c sum_m pi_mc N(mu_mc, s Sigma_mc)`` over classes that somebody described.

    Attributes:
        classes: the C class ids.
        omega: (C,), sums to 1.
        pi: per class, the weights of its clients, which sum to 1.
        gaussians: per class, its clients' Gaussians.
    """

    classes: tuple[int, ...]
    omega: F64
    pi: tuple[F64, ...]
    gaussians: tuple[tuple[Gaussian, ...], ...]

    def mean(self, label: int) -> F64:
        """Return the federated mean of one class, (d,)."""
        c = self.classes.index(label)
        means = np.stack([g.mean for g in self.gaussians[c]])  # (M, d)
        mean: F64 = self.pi[c] @ means
        return mean

    def draw(self, total: int, scale: float, rng: np.random.Generator) -> tuple[F32, I64]:
        """Draw features.

        Args:
            total: N, the number of samples over all classes.
            scale: s.
            rng: the source; the draws depend on it and on the mixture alone.

        Returns:
            Features (N, d), grouped by class, and their columns in ``classes`` (N,).
        """
        chunks, columns = [], []
        for c, n in enumerate(rng.multinomial(total, self.omega)):
            for gaussian, m in zip(self.gaussians[c], rng.multinomial(n, self.pi[c]), strict=True):
                if m:
                    chunks.append(sample_gaussian(gaussian, m, scale, rng).astype(np.float32))
                    columns.append(np.full(m, c, dtype=np.int64))
        return np.concatenate(chunks), np.concatenate(columns)


def make_mixture(
    entries: Sequence[Entry],
    classes: Sequence[int],
    class_weights: Literal["counts", "uniform"],
    max_share: float = 1.0,
) -> Mixture:
    """Weigh the entries by their image counts.

    Args:
        entries: at most one per client and class; those without covariance borrow one.
        classes: ids in the order that the mixture keeps; those without entry are left out.
        class_weights: ``counts``: omega_c = N_c / N; ``uniform``: 1 / C.
        max_share: largest share of one client in a task's images, and in a class that others
            have as well; at 1 the weights are the plain shares.
    """
    filled = _with_covariances(entries)
    counts = _capped_counts(filled, max_share)  # (E,)
    present, totals, pi, gaussians = [], [], [], []
    for label in classes:
        own = [i for i, e in enumerate(filled) if e.label == label]
        if own:
            present.append(label)
            totals.append(counts[own].sum())
            pi.append(sample_weights(counts[own].tolist(), max_share))
            gaussians.append(tuple(filled[i].gaussian for i in own))
    shares = np.array(totals if class_weights == "counts" else [1.0] * len(totals))
    omega: F64 = shares / max(shares.sum(), np.finfo(np.float64).tiny)
    return Mixture(tuple(present), omega, tuple(pi), tuple(gaussians))


def _capped_counts(entries: Sequence[Entry], max_share: float) -> F64:
    """Return each entry's count (E,), scaled so that no client exceeds its share of a task.

    Without this, one client could claim so many images of a class that nothing else is sampled.
    """
    counts = np.array([e.gaussian.count for e in entries], dtype=np.float64)
    rows: dict[int, dict[str, list[int]]] = {}  # task -> client -> its entries
    for i, e in enumerate(entries):
        rows.setdefault(e.task, {}).setdefault(e.client, []).append(i)
    for clients in rows.values():
        totals = np.array([counts[own].sum() for own in clients.values()])
        factors = sample_weights(totals.tolist(), max_share) * totals.sum() / totals
        for own, factor in zip(clients.values(), factors, strict=True):
            counts[own] *= factor
    return counts


def _with_covariances(entries: Sequence[Entry]) -> list[Entry]:
    """Give entries of a single image the covariance that describes them best."""
    lenders: dict[tuple[object, ...], list[Gaussian]] = {}
    for e in entries:
        for group in _groups(e) if e.gaussian.count > 1 else ():
            lenders.setdefault(group, []).append(e.gaussian)
    average = cache(lambda group: pooled_covariance(lenders[group]))
    filled = []
    for e in entries:
        found = next((group for group in _groups(e) if group in lenders), None)
        if e.gaussian.count > 1:
            filled.append(e)
        elif found is None:
            flat = np.full_like(e.gaussian.mean, _LAST_RESORT)
            filled.append(replace(e, gaussian=replace(e.gaussian, rest=flat)))
        else:
            factor, rest = average(found)
            filled.append(replace(e, gaussian=replace(e.gaussian, factor=factor, rest=rest)))
    return filled


def _groups(entry: Entry) -> tuple[tuple[object, ...], ...]:
    """Return who may lend a covariance: the same class, the client's task, the task."""
    task = entry.task
    return ("class", task, entry.label), ("client", task, entry.client), ("task", task)
