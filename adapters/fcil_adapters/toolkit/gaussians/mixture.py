"""The two tiers of generative prototypes: clients within a class, and classes (torch).

Salami et al., Federated Class-Incremental Learning with Hierarchical Generative Prototypes, 2024,
https://arxiv.org/abs/2406.02447.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.numerics.client_weights import allowed_counts, sample_weights
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.gaussians.batches import pooled_covariances, sample_gaussians
from fcil_adapters.toolkit.gaussians.gaussian import Gaussian
from fcil_adapters.toolkit.gaussians.store import ClassEntry

F64 = NDArray[np.float64]

_Group = tuple[str, int, str]  # kind, task, and the class or client

# Variance for tasks in which no client has two images of any class.
_LAST_RESORT = 1e-4


@dataclass(frozen=True)
class Mixture:
    """``Q = sum_c omega_c sum_m pi_mc N(mu_mc, s Sigma_mc)`` over the described classes.

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

    def draw(
        self,
        total: int,
        scale: float,
        rng: np.random.Generator,
        draws: Generator,
        device: str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Draw features: first the numbers per class and client, then all features at once.

        Args:
            total: N, the number of samples over all classes.
            scale: s.
            rng: the source of the numbers; with ``draws`` and the mixture it decides all.
            draws: the source of the features.
            device: where to compute.

        Returns:
            Features (N, d), grouped by class, and their columns in ``classes`` (N,).
        """
        sizes = rng.multinomial(total, self.omega)  # (C,)
        shares = [rng.multinomial(n, pi) for n, pi in zip(sizes, self.pi, strict=True)]
        gaussians = tuple(chain(*self.gaussians))
        features = sample_gaussians(gaussians, np.concatenate(shares), scale, draws, device)
        return features, to_torch(np.repeat(np.arange(len(sizes)), sizes), device)


def make_mixture(
    entries: Sequence[ClassEntry],
    classes: Sequence[int],
    class_weights: Literal["counts", "uniform"],
    max_share: float = 1.0,
    device: str = "cpu",
) -> Mixture:
    """Weigh the entries by their image counts.

    Args:
        entries: at most one per client and class; those without covariance borrow one.
        classes: ids in the order that the mixture keeps; those without entry are left out.
        class_weights: ``counts``: omega_c = N_c / N; ``uniform``: 1 / C.
        max_share: largest share of one client in a task's images, and in a class that others
            have as well; at 1 the weights are the plain shares.
        device: where to compute.
    """
    counts = _capped_counts(entries, max_share)  # (E,)
    filled = _with_covariances(entries, counts, max_share, device)
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


def _capped_counts(entries: Sequence[ClassEntry], max_share: float) -> F64:
    """Return each entry's count (E,), lowered so that no client exceeds its share of a task.

    Without this, a client could claim enough images of a class that nothing else is sampled, of
    this task or of any other.
    """
    counts = np.array([e.gaussian.count for e in entries], dtype=np.float64)
    rows: dict[int, dict[str, list[int]]] = {}  # task -> client -> its entries
    for i, e in enumerate(entries):
        rows.setdefault(e.task, {}).setdefault(e.client, []).append(i)
    for clients in rows.values():
        totals = np.array([counts[own].sum() for own in clients.values()])
        factors = allowed_counts(totals.tolist(), max_share) / totals
        for own, factor in zip(clients.values(), factors, strict=True):
            counts[own] *= factor
    return counts


def _with_covariances(
    entries: Sequence[ClassEntry], counts: F64, max_share: float, device: str
) -> list[ClassEntry]:
    """Give entries of a single image the covariance that describes them best.

    Lenders are weighed by ``counts`` (E,), those of one class with the cap of a class.
    """
    lenders: dict[_Group, list[int]] = {}
    for i, e in enumerate(entries):
        for group in _groups(e) if e.gaussian.count > 1 else ():
            lenders.setdefault(group, []).append(i)
    lonely = [i for i, e in enumerate(entries) if e.gaussian.count == 1]
    found = {i: next((g for g in _groups(entries[i]) if g in lenders), None) for i in lonely}
    asked = sorted({group for group in found.values() if group is not None})
    groups = [[entries[i].gaussian for i in lenders[g]] for g in asked]
    shares = [
        sample_weights(counts[lenders[g]].tolist(), max_share if g[0] == "class" else 1.0)
        for g in asked
    ]
    pooled = dict(zip(asked, pooled_covariances(groups, device, shares), strict=True))
    filled = list(entries)
    for i, lender in found.items():
        own = entries[i].gaussian
        flat = np.full(own.mean.shape, _LAST_RESORT, dtype=np.float32)
        factor, rest = (own.factor, flat) if lender is None else pooled[lender]
        filled[i] = replace(entries[i], gaussian=replace(own, factor=factor, rest=rest))
    return filled


def _groups(entry: ClassEntry) -> tuple[_Group, _Group, _Group]:
    """Return the groups that may lend a covariance: the same class, the client's task, the task."""
    task = entry.task
    of_class = ("class", task, str(entry.label))
    return of_class, ("client", task, entry.client), ("task", task, "")
