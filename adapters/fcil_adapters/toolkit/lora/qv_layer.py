"""Low-rank adapters on the query and value columns of a fused qkv Linear.

LoRA: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022,
https://arxiv.org/abs/2106.09685. timm computes q, k and v of a block by one Linear
(d -> 3d); an adapter adds ``scale * B A x`` to the output columns 0:d (q) and 2d:3d (v).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.numerics.torch_numpy import to_torch

PROJECTIONS = ("q", "v")
_COLUMNS: Mapping[str, int] = MappingProxyType({"q": 0, "v": 2})  # index of the third of the output


@dataclass(frozen=True)
class LoraPair:
    """One low-rank update of a projection: ``delta(x) = scale * B (A x)``.

    Attributes:
        A: (r, d).
        B: (d, r).
    """

    A: Tensor
    B: Tensor

    def product(self) -> Tensor:
        """Return B A in float64: (d, d)."""
        return self.B.double() @ self.A.double()


Pairs = Mapping[str, LoraPair]  # projection -> pair


def read_pair(tensors: Mapping[str, NDArray[np.float32]], place: str, device: str) -> LoraPair:
    """Return the pair of a place (`lora.tensors`), copied to a device."""
    return LoraPair(*(to_torch(tensors[f"lora.{place}.{m}"], device) for m in "AB"))


def read_pairs(
    tensors: Mapping[str, NDArray[np.float32]], block: int, device: str
) -> dict[str, LoraPair]:
    """Return the q and v pairs of a block."""
    return {p: read_pair(tensors, f"{block}.{p}", device) for p in PROJECTIONS}


def sum_pairs(many: Sequence[Pairs]) -> dict[str, LoraPair]:
    """Add A's and B's separately, in float64; the product of the sums, not the sum of products."""
    return {
        p: LoraPair(
            torch.stack([pairs[p].A.double() for pairs in many]).sum(0),
            torch.stack([pairs[p].B.double() for pairs in many]).sum(0),
        )
        for p in PROJECTIONS
    }


class LoRAQKV(nn.Module):
    """A shared, frozen qkv Linear with frozen past pairs and, perhaps, one trainable pair.

    With past pairs P, a trainable pair (A, B) and an offset (A0, B0), the q and v columns are

        W x + b + scale * sum_P B_i A_i x + scale * (B0 + B) (A0 + A) x

    The past products are merged once into a copy of W that belongs to this module, so they cost
    nothing in the forward pass; without past pairs the shared W itself is used.

    Args:
        linear: the fused Linear (d -> 3d); neither modified nor copied.
        past: frozen pairs per projection, whose products are summed.
        current: start values of the trainable pair per projection; None: nothing to train.
        offset: constants added to A and B before their product; needs ``current``.
        scale: factor of every product.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        past: Sequence[Pairs] = (),
        current: Pairs | None = None,
        offset: Pairs | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        d = linear.in_features
        assert linear.out_features == 3 * d, "not a fused qkv Linear"
        assert offset is None or current is not None
        self.bias = linear.bias
        self.weight = linear.weight if not past else _merge(linear.weight, past, scale)  # (3d, d)
        self.scale = scale
        self.pairs = nn.ModuleDict()
        self.offset = {p: _as_float(pair) for p, pair in (offset or {}).items()}
        for p, pair in (current or {}).items():
            start = {"A": pair.A, "B": pair.B}
            self.pairs[p] = nn.ParameterDict(
                {n: nn.Parameter(t.detach().float().clone()) for n, t in start.items()}
            )

    def adapter_params(self) -> dict[str, nn.Parameter]:
        """Return this layer's trainables by name: ``q.A``, ``q.B``, ``v.A``, ``v.B``."""
        return {f"{p}.{n}": pair[n] for p, pair in self._trainable().items() for n in ("A", "B")}

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens (..., d) to (..., 3d)."""
        y = functional.linear(x, self.weight, self.bias)  # (..., 3d)
        trainable = self._trainable()
        if not trainable:
            return y
        thirds = list(y.chunk(3, dim=-1))  # q, k, v: (..., d) each
        for p, pair in trainable.items():
            A, B = pair["A"], pair["B"]  # (r, d), (d, r)
            if p in self.offset:
                A, B = self.offset[p].A + A, self.offset[p].B + B
            low = functional.linear(x, A)  # (..., r)
            thirds[_COLUMNS[p]] = thirds[_COLUMNS[p]] + self.scale * functional.linear(low, B)
        return torch.cat(thirds, dim=-1)

    def _trainable(self) -> dict[str, Any]:
        return dict(self.pairs.items())


def attach_qv(
    view: Any,
    block: int,
    *,
    past: Sequence[Pairs] = (),
    current: Pairs | None = None,
    offset: Pairs | None = None,
    scale: float = 1.0,
) -> LoRAQKV:
    """Replace one block's qkv Linear of a backbone view by a `LoRAQKV` over it."""
    attention = view.blocks[block].attn
    layer = LoRAQKV(attention.qkv, past=past, current=current, offset=offset, scale=scale)
    attention.qkv = layer
    return layer


def adapter_params(view: Any, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
    """Collect the declared trainables of the adapted blocks: ``0.q.A`` -> parameter.

    Fails if the view holds a trainable parameter that no layer declared, or the reverse.
    """
    found = {
        f"{block}.{name}": parameter
        for block in blocks
        for name, parameter in view.blocks[block].attn.qkv.adapter_params().items()
    }
    trainable = {id(p) for p in view.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in found.values()}, "trainables and declarations differ"
    return found


def _merge(weight: Tensor, past: Sequence[Pairs], scale: float) -> Tensor:
    """Return a copy of the fused weight (3d, d) with all past products added."""
    d = weight.shape[1]
    merged = weight.detach().double().clone()
    for p, third in _COLUMNS.items():
        rows = slice(third * d, (third + 1) * d)
        for pairs in past:
            merged[rows] += scale * pairs[p].product()
    return merged.to(weight.dtype)


def _as_float(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.A.float(), pair.B.float())
