"""The residual: the mean of the clients' products less the product of the means (torch).

Eq. 4 of the paper, for any weights that sum to 1:

    W_res = sum_k w_k B_k A_k - B A,        B = sum_k w_k B_k,  A = sum_k w_k A_k

It equals ``sum_k w_k (B_k - B)(A_k - A)``, so its rank is at most (K - 1) r. B and A are the
float32 values that clients receive; their rounding error is below `_FLOAT32` times the norms of the
factors and is cut off with all else that float32 weights cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.contract import Array, Updates
from fcil_adapters.methods.fed_talora.parts import is_wide
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch

Tensors = Mapping[str, Array]
F32 = NDArray[np.float32]
Factors = dict[str, tuple[F32, F32]]  # place -> L (out, R), R (R, in)

_FLOAT32 = 2.0**-23
_RELATIVE = 1e-7  # singular values below this share of the largest are rounding


class Residual:
    """The residual of all adapted matrices; those of one shape are computed together.

    Args:
        updates: the clients' LoRA; opened one at a time.
        weights: (K,), they sum to 1.
        mean: the averaged LoRA as it is broadcast.
        places: the adapted matrices.
        device: torch device name.

    Attributes:
        wide: True if the stacked factors can have full rank (`is_wide`); the sum is then kept
            dense, so memory does not depend on K.
    """

    def __init__(
        self,
        updates: Updates,
        weights: NDArray[np.float64],
        mean: Tensors,
        places: Sequence[str],
        device: str,
    ) -> None:
        self._device = device
        shapes = {place: _shape(mean, place) for place in places}
        self._groups = tuple(
            tuple(place for place in places if shapes[place] == shape)
            for shape in sorted(set(shapes.values()))
        )
        rank = len(mean[f"lora.{places[0]}.A"])
        width = (len(updates) + 1) * rank  # m, of all terms side by side
        self.wide = is_wide(width, shapes.values())
        self._sums, self._left, self._right = [], [], []
        for group in self._groups:
            P, (out, into) = len(group), shapes[group[0]]
            if self.wide:
                self._sums.append(_zeros((P, out, into), device))
            else:
                self._left.append(_zeros((P, out, width), device))
                self._right.append(_zeros((P, width, into), device))
        for k, (weight, update) in enumerate(zip(weights.tolist(), updates, strict=True)):
            self._add(k, weight, update.payload.tensors)
        self._add(len(updates), -1.0, mean)
        # Bound of float32's precision in B A, for every matrix of a group.
        self._floors = [
            _FLOAT32 * _norms(A) * _norms(B)
            for A, B in (self._factors(mean, group) for group in self._groups)
        ]

    def _factors(self, tensors: Tensors, group: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return A (P, r, in) and B (P, out, r) of the P places of a group, in float64."""
        A, B = (np.stack([tensors[f"lora.{place}.{m}"] for place in group]) for m in "AB")
        return to_torch(A, self._device, torch.float64), to_torch(B, self._device, torch.float64)

    def _add(self, k: int, weight: float, tensors: Tensors) -> None:
        """Add the k-th term to the sums, or put it into its place in the stacks."""
        for g, group in enumerate(self._groups):
            A, B = self._factors(tensors, group)
            if self.wide:
                self._sums[g].baddbmm_(B, A, alpha=weight)
            else:
                own = slice(k * A.shape[1], (k + 1) * A.shape[1])
                self._left[g][:, :, own] = weight * B
                self._right[g][:, own] = A

    def dense(self) -> dict[str, Tensor]:
        """Return the residual of each place as a matrix (out, in); empty if all are negligible."""
        sums: dict[str, Tensor] = {}
        nothing = True
        for g, group in enumerate(self._groups):
            W = self._sums[g] if self.wide else torch.bmm(self._left[g], self._right[g])
            nothing &= bool((_norms(W) <= self._floors[g]).all())
            sums.update(zip(group, W, strict=True))
        return {} if nothing else sums

    def factors(self) -> Factors:
        """Return the residual of each place in the fewest factors; empty if all are negligible.

        They are float32 already: for many clients they are as large as the dense sum.
        """
        found: Factors = {}
        for g, group in enumerate(self._groups):
            U, s, V = (
                torch.linalg.svd(self._sums[g], full_matrices=False)
                if self.wide
                else self._thin_svd(g)
            )
            least = torch.maximum(_RELATIVE * s[:, 0], self._floors[g])  # (P,)
            ranks = (s > least[:, None]).sum(1).tolist()  # singular values come in order
            root = s.sqrt()  # (P, m)
            L, R = U * root[:, None, :], root[:, :, None] * V  # (P, out, m), (P, m, in)
            for i, (place, rank) in enumerate(zip(group, ranks, strict=True)):
                found[place] = (to_numpy(L[i, :, :rank]), to_numpy(R[i, :rank]))
        return found if any(L.shape[1] for L, _ in found.values()) else {}

    def _thin_svd(self, g: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the SVD of L R from a core (m, m): U (P, out, m), s (P, m), V (P, m, in)."""
        Ql, Rl = torch.linalg.qr(self._left[g])
        Qr, Rr = torch.linalg.qr(self._right[g].mT)
        U, s, V = torch.linalg.svd(Rl @ Rr.mT)
        return Ql @ U, s, V @ Qr.mT


def _shape(mean: Tensors, place: str) -> tuple[int, int]:
    """Return (out, in) of a place."""
    return mean[f"lora.{place}.B"].shape[0], mean[f"lora.{place}.A"].shape[1]


def _zeros(shape: tuple[int, int, int], device: str) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _norms(matrices: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix (P, m, n): (P,)."""
    norms: Tensor = torch.linalg.matrix_norm(matrices)
    return norms
