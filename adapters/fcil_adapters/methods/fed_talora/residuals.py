"""The residual: what the mean of the clients' products has that the product of means lacks (torch).

Eq. 4 of the paper, for any weights that sum to 1:

    W_res = sum_k w_k B_k A_k - B A,        B = sum_k w_k B_k,  A = sum_k w_k A_k

It equals ``sum_k w_k (B_k - B)(A_k - A)``, so its rank is at most (K - 1) r. B and A are the
float32 values that clients receive; what their rounding leaves is below `_FLOAT32` times the
norms of the factors and is cut off with everything else that float32 weights cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Updates
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_protocol.payload import Array

Tensors = Mapping[str, Array]
Factors = dict[str, tuple[Tensor, Tensor]]  # place -> L (out, R), R (R, in)

_FLOAT32 = 2.0**-23
_RELATIVE = 1e-7  # singular values below this share of the largest are rounding


class Residual:
    """The residual of all adapted matrices; blocks of one module are computed together.

    Args:
        updates: the clients' LoRA; opened one at a time.
        weights: (K,), they sum to 1.
        mean: the averaged LoRA as it is broadcast.
        h: rank, blocks, modules.
        device: torch device name.

    Attributes:
        wide: whether stacked factors would be no smaller than the dense sum; the sum is then
            kept dense, so memory does not depend on K.
    """

    def __init__(
        self,
        updates: Updates,
        weights: NDArray[np.float64],
        mean: Tensors,
        h: FedTaloraHparams,
        device: str,
    ) -> None:
        self._h = h
        self._device = device
        self._blocks = sorted(h.blocks)
        self._floors = {m: self._floor(mean, m) for m in h.modules}  # (blocks,)
        self.wide = (len(updates) + 1) * h.rank >= self._smallest_side(mean)
        self._left: dict[str, list[Tensor]] = {m: [] for m in h.modules}
        self._right: dict[str, list[Tensor]] = {m: [] for m in h.modules}
        terms: Iterator[tuple[float, Tensors]] = (
            (float(w), u.payload.tensors) for w, u in zip(weights, updates, strict=True)
        )
        for weight, tensors in chain(terms, [(-1.0, mean)]):
            self._add(weight, tensors)

    def _pair(self, tensors: Tensors, module: str) -> tuple[Tensor, Tensor]:
        """Return a module's A (blocks, r, in) and B (blocks, out, r) in float64."""
        A, B = (np.stack([tensors[f"lora.{b}.{module}.{m}"] for b in self._blocks]) for m in "AB")
        return to_torch(A, self._device, torch.float64), to_torch(B, self._device, torch.float64)

    def _smallest_side(self, mean: Tensors) -> int:
        pairs = [self._pair(mean, module) for module in self._h.modules]
        return min(min(A.shape[2], B.shape[1]) for A, B in pairs)

    def _floor(self, mean: Tensors, module: str) -> Tensor:
        A, B = self._pair(mean, module)
        return _FLOAT32 * _norms(A) * _norms(B)

    def _add(self, weight: float, tensors: Tensors) -> None:
        for module in self._h.modules:
            A, B = self._pair(tensors, module)
            left = self._left[module]
            if not self.wide:
                left.append(weight * B)
                self._right[module].append(A)
            elif left:
                left[0] = torch.baddbmm(left[0], B, A, alpha=weight)
            else:
                left.append(weight * (B @ A))

    def dense(self) -> dict[str, Tensor]:
        """Return the residual of each place as a matrix (out, in); empty if all are nothing."""
        sums, nothing = {}, True
        for module in self._h.modules:
            W = self._left[module][0] if self.wide else torch.bmm(*self._stacked(module))
            nothing &= bool((_norms(W) <= self._floors[module]).all())
            sums.update({f"{b}.{module}": W[i] for i, b in enumerate(self._blocks)})
        return {} if nothing else sums

    def factors(self) -> Factors:
        """Return the residual of each place in as few factors as it takes; empty if nothing."""
        found: Factors = {}
        for module in self._h.modules:
            U, s, V = (
                torch.linalg.svd(self._left[module][0], full_matrices=False)
                if self.wide
                else self._thin_svd(module)
            )
            least = torch.maximum(_RELATIVE * s[:, 0], self._floors[module])  # (blocks,)
            for i, b in enumerate(self._blocks):
                R = int((s[i] > least[i]).sum())
                root = s[i, :R].sqrt()
                found[f"{b}.{module}"] = (U[i, :, :R] * root, root[:, None] * V[i, :R])
        return found if any(L.shape[1] for L, _ in found.values()) else {}

    def _stacked(self, module: str) -> tuple[Tensor, Tensor]:
        """Return the terms side by side: L (blocks, out, m), R (blocks, m, in)."""
        return torch.cat(self._left[module], 2), torch.cat(self._right[module], 1)

    def _thin_svd(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the SVD of L R from a core (m, m): U (blocks, out, m), s, V (blocks, m, in)."""
        L, R = self._stacked(module)
        Ql, Rl = torch.linalg.qr(L)
        Qr, Rr = torch.linalg.qr(R.mT)
        U, s, V = torch.linalg.svd(Rl @ Rr.mT)
        return Ql @ U, s, V @ Qr.mT


def _norms(matrices: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix (blocks, m, n): (blocks,)."""
    norms: Tensor = torch.linalg.matrix_norm(matrices)
    return norms
