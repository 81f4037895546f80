"""Merges in closed form: the weights nearest to all clients' on the inputs that these have (torch).

Jin, Ren, Preotiuc-Pietro, Cheng: Dataless Knowledge Fusion by Merging Weights of Language Models,
ICLR 2023, https://arxiv.org/abs/2212.09849 (RegMean). With Gram matrices ``G_k = X_k X_k^T`` of the
inputs, ``sum_k |(W - W_k) X_k|^2`` is least at ``(sum_k W_k G_k)(sum_k G_k)^-1``. All in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SILENT = 1e-12  # columns with less than this share of the largest have no inputs


@dataclass(frozen=True)
class RegMean:
    """Sums over the clients, around a mean of their weights.

    Around the mean, equal clients and a single one give their own weights exactly.

    Attributes:
        mean: (out, n), to which the merge is pulled.
        moved: sum of ``(W_k - mean) G_k``, (out, n).
        gram: sum of G_k, (n, n), or of their diagonals, (n,).
    """

    mean: Tensor
    moved: Tensor
    gram: Tensor

    @classmethod
    def around(cls, mean: Tensor, *, diagonal: bool) -> RegMean:
        """Return the sums over no client."""
        wide = mean.double()
        n = wide.shape[1]
        gram = wide.new_zeros((n,) if diagonal else (n, n))
        return cls(wide, torch.zeros_like(wide), gram)

    def add(self, weight: float, W: Tensor, root: Tensor) -> None:
        """Add a client.

        Args:
            weight: of its mean Gram matrix: its share of the images.
            W: its weights, (out, n).
            root: R (n, n) with ``R^T R = G``, or the root of its diagonal, (n,).
        """
        step, R = W.double() - self.mean, root.double()
        if R.ndim == 1:
            gram = weight * R.square()
            self.moved.add_(step * gram)
        else:
            gram = weight * (R.mT @ R)
            self.moved.add_(step @ gram)
        self.gram.add_(gram)

    def merged(self, eps: float) -> Tensor:
        """Return the merge (out, n).

        With matrices it is pulled to the mean by ``eps tr(G) / n`` in all directions, so that the
        inverse exists; with diagonals, columns without inputs keep the mean.
        """
        if self.gram.ndim == 1:
            fires = self.gram > SILENT * self.gram.max()
            return self.mean + torch.where(fires, self.moved / self.gram, 0.0)
        pull = eps * self.gram.diagonal().mean()
        if not pull > 0:  # no input at all
            return self.mean
        pulled = self.gram + pull * torch.eye(len(self.gram)).to(self.gram)
        return self.mean + torch.cholesky_solve(self.moved.mT, torch.linalg.cholesky(pulled)).mT


def task_shares(squares: Sequence[Tensor | None]) -> Tensor:
    """Return the share of each of T tasks in each column of the merged weights, (T, n).

    ``(sum_t W_t D_t)(sum_t D_t)^-1`` for diagonals D_t, as factors of the tasks' columns.

    Args:
        squares: D_t, (n,); None for a task without, which counts as the mean of the others.

    Returns:
        (T, n); without any D_t 1 / T, (T, 1).
    """
    if not squares:
        return torch.zeros((0, 1), dtype=torch.float64)
    known = [one for one in squares if one is not None]
    even = 1 / len(squares)
    if not known:
        return torch.full((len(squares), 1), even, dtype=torch.float64)
    typical = torch.stack(known).mean(0)
    D = torch.stack([typical if one is None else one for one in squares])  # (T, n)
    total = D.sum(0)
    return torch.where(total > SILENT * total.max(), D / total, even)


def root_of(gram: Tensor) -> Tensor:
    """Return the upper triangular R (n, n) with ``R^T R = G``; negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(gram)
    factor = values.clamp_min(0).sqrt()[:, None] * vectors.mT
    R: Tensor = torch.linalg.qr(factor, mode="r").R
    return R


def pack_triangle(R: Tensor) -> Tensor:
    """Return the upper triangle of a matrix (n, n), row after row: (n (n + 1) / 2,)."""
    row, column = torch.triu_indices(len(R), len(R), device=R.device)
    return R[row, column]


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """Return the upper triangular matrix (n, n); the reverse of packing."""
    R = packed.new_zeros((n, n))
    row, column = torch.triu_indices(n, n, device=packed.device)
    R[row, column] = packed
    return R
