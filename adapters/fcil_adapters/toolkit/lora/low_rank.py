"""LoRA as changes of weights that any program can add: in factors, exactly (torch-free).

A method's manifest names the function that reads its broadcast so (`Method.changes`); the export of
an adapter puts the changes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context
from fcil_adapters.toolkit.lora.manifest import places, read_parts
from fcil_adapters.toolkit.lora.tensors import F32
from fcil_protocol.payloads.payload import Payload

F64 = NDArray[np.float64]
Pair = tuple[F32, F32]  # A (r, in) and B (out, r)

_RELATIVE = 1e-7  # singular values below this share of the largest are rounding


@dataclass(frozen=True)
class Change:
    """The change of one module's weight, before the scale: the sum of products B A, and a matrix.

    Attributes:
        pairs: the factors A (r, in) and B (out, r) of each product; at least one.
        dense: (out, in); None: nothing.
    """

    pairs: tuple[Pair, ...]
    dense: F32 | None = None

    def total(self) -> F64:
        """Return the sum (out, in)."""
        A, B = _stacked(self.pairs)
        product: F64 = B.astype(np.float64) @ A.astype(np.float64)
        return product if self.dense is None else product + self.dense

    def factors(self) -> tuple[F32, F32, bool]:
        """Return one pair with the same product, and True if it is of a factorisation.

        The pairs one after the other, as they are: their ranks add up. Where there is a dense
        matrix, or the ranks would exceed the matrix's own, the sum's singular value decomposition.
        """
        A, B = _stacked(self.pairs)
        if self.dense is None and len(A) < min(len(B), A.shape[1]):
            return A, B, False
        U, s, V = np.linalg.svd(self.total(), full_matrices=False)
        rank = max(1, int((s > _RELATIVE * s[0]).sum()))  # in order
        root = np.sqrt(s[:rank])
        A, B = root[:, None] * V[:rank], U[:, :rank] * root
        return A.astype(np.float32), B.astype(np.float32), True


@dataclass(frozen=True)
class Changes:
    """The changes of all adapted weights.

    Attributes:
        scale: factor of every change.
        places: ``<block>.<module>`` (`lora.tensors`) -> its change.
    """

    scale: float
    places: Mapping[str, Change]

    @classmethod
    def of(cls, scale: float, loras: Iterable[Mapping[str, F32]]) -> Changes:
        """Return the sum of the products of several LoRAs.

        Args:
            scale: factor of every product.
            loras: `lora.tensors` by name; those of one place follow each other in this order.
        """
        found: dict[str, list[Pair]] = {}
        for lora in loras:
            for name, A in lora.items():
                place = name.removeprefix("lora.").removesuffix(".A")
                if name.endswith(".A"):
                    found.setdefault(place, []).append((A, lora[f"lora.{place}.B"]))
        return cls(scale, {place: Change(tuple(pairs)) for place, pairs in found.items()})


def lora_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return the changes of a method with one LoRA and a linear head (`lora.manifest`)."""
    h = ctx.hparams
    lora = read_parts(h, broadcast).lora
    chosen = {f"lora.{place}.{m}": lora[f"lora.{place}.{m}"] for place in places(h) for m in "AB"}
    return Changes.of(h.scale, [chosen])


def _stacked(pairs: Iterable[Pair]) -> Pair:
    many = tuple(pairs)
    return np.concatenate([A for A, _ in many]), np.concatenate([B for _, B in many], axis=1)
