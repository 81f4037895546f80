"""Low-rank adapters on the Linears of a block, beside a change of their frozen weights (torch).

LoRA: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022,
https://arxiv.org/abs/2106.09685. timm computes q, k and v of a block by one Linear (d -> 3d), so a
*module*, such as qkv, q or fc1, is a Linear or an equal slice of its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.lora.tensors import PLACES, AdaptedLinear
from fcil_protocol.errors import DataError


@dataclass(frozen=True)
class LoraPair:
    """One low-rank update of a module's weight: ``delta(x) = B (A x)``.

    Attributes:
        A: (r, in).
        B: (out, r).
    """

    A: Tensor
    B: Tensor

    def product(self) -> Tensor:
        """Return B A in float64: (out, in)."""
        return self.B.double() @ self.A.double()


Pairs = Mapping[str, LoraPair]  # module -> pair

NONE: Mapping[str, Any] = MappingProxyType({})


def read_pairs(
    tensors: Mapping[str, NDArray[np.float32]],
    block: int,
    device: str,
    modules: Iterable[str] = ("q", "v"),
) -> dict[str, LoraPair]:
    """Return the pairs of a block's modules (`lora.tensors`), copied to a device."""
    return {
        module: LoraPair(*(to_torch(tensors[f"lora.{block}.{module}.{m}"], device) for m in "AB"))
        for module in modules
    }


def sum_pairs(many: Sequence[Pairs]) -> dict[str, LoraPair]:
    """Add A's and B's separately, in float64; the product of the sums, not the sum of products."""
    return {
        module: LoraPair(
            torch.stack([pairs[module].A.double() for pairs in many]).sum(0),
            torch.stack([pairs[module].B.double() for pairs in many]).sum(0),
        )
        for module in many[0]
    }


class LoRALinear(nn.Module):
    """A shared, frozen Linear with a change and perhaps a trainable pair per slice of its output.

    The slice of a module with change D, past pairs P, pair (A, B) and offset (A0, B0) is

        (W + D) x + b + scale * sum_P B_i A_i x + scale * (B0 + B) (A0 + A) x

    D and the past products are merged once into a copy of W that belongs to this module, so they
    cost nothing in the forward pass; without any, the shared W itself is used.

    Args:
        linear: the Linear (in -> slices * out); neither modified nor copied.
        slices: names of the equal slices of its output.
        change: module -> D, (out, in).
        past: frozen pairs, whose products are summed.
        current: start values of the trainable pairs.
        offset: constants added to A and B before their product, for modules of ``current``.
        scale: factor of every product.
        train: the factors of each pair that are trained: ``AB``, ``A`` or ``B``.
    """

    def __init__(
        self,
        linear: nn.Linear,
        slices: tuple[str, ...],
        *,
        change: Mapping[str, Tensor] = NONE,
        past: Sequence[Pairs] = (),
        current: Pairs = NONE,
        offset: Pairs = NONE,
        scale: float = 1.0,
        train: str = "AB",
    ) -> None:
        super().__init__()
        assert linear.out_features % len(slices) == 0, "slices are not equal"
        assert offset.keys() <= current.keys(), "an offset of a module without a pair"
        self.bias = linear.bias
        shared = linear.weight
        kept = not (change or past)
        self.weight = shared if kept else _changed(shared, slices, change, past, scale)
        self.slices = slices
        self.scale = scale
        self.offset = {m: LoraPair(pair.A.float(), pair.B.float()) for m, pair in offset.items()}
        self.pairs = nn.ModuleDict()
        for module, pair in current.items():
            A = nn.Parameter(pair.A.detach().float().clone(), requires_grad="A" in train)
            B = nn.Parameter(pair.B.detach().float().clone(), requires_grad="B" in train)
            self.pairs[module] = nn.ParameterDict({"A": A, "B": B})

    def trained(self) -> dict[str, nn.Parameter]:
        """Return this layer's trainables by name, such as ``fc1.A`` and ``fc1.B``."""
        return {
            f"{module}.{name}": pair[name]
            for module, pair in self._pairs().items()
            for name in ("A", "B")
            if pair[name].requires_grad
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (..., in) to (..., slices * out)."""
        y = functional.linear(x, self.weight, self.bias)
        pairs = self._pairs()
        if not pairs:
            return y
        outputs = list(y.chunk(len(self.slices), dim=-1))  # (..., out) each
        for module, pair in pairs.items():
            A, B = pair["A"], pair["B"]  # (r, in), (out, r)
            if module in self.offset:
                A, B = self.offset[module].A + A, self.offset[module].B + B
            low = functional.linear(x, A)  # (..., r)
            i = self.slices.index(module)
            outputs[i] = outputs[i] + self.scale * functional.linear(low, B)
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    def _pairs(self) -> dict[str, Any]:
        return dict(self.pairs.items())


def attach(
    view: Any,
    block: int,
    *,
    change: Mapping[str, Tensor] = NONE,
    past: Sequence[Pairs] = (),
    current: Pairs = NONE,
    offset: Pairs = NONE,
    scale: float = 1.0,
    train: str = "AB",
) -> None:
    """Replace the Linears of one block of a backbone view that a change or a pair names.

    Args:
        view: a view of its own (`Backbone.view`).
        block: index of the block.
        change: module -> dense change of its weight, (out, in).
        past: frozen pairs of modules.
        current: trainable pairs.
        offset: constants added to A and B of trainable pairs.
        scale: factor of every product.
        train: the factors of each pair that are trained.

    Raises:
        DataError: the backbone's Linear has another shape than a change or a pair.
    """
    for place in PLACES:
        dense, now, constant = place.own(change), place.own(current), place.own(offset)
        before = [pairs for pairs in map(place.own, past) if pairs]
        if not (dense or now or before):
            continue
        owner = getattr(view.blocks[block], place.owner)
        linear = getattr(owner, place.name)
        slices = place.slices([*dense, *now, *(m for pairs in before for m in pairs)])
        _check_shapes(linear, place, block, slices, dense, [now, constant, *before])
        layer = LoRALinear(
            linear, slices, change=dense, past=before, current=now, offset=constant, scale=scale,
            train=train,
        )  # fmt: skip
        setattr(owner, place.name, layer)


def trained_params(view: Any, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
    """Collect the declared trainables of the adapted blocks: ``0.fc1.A`` -> parameter.

    Fails if the view holds a trainable parameter that no layer declared, or the reverse.
    """
    found: dict[str, nn.Parameter] = {}
    for block, layer in adapted_layers(view, blocks):
        found.update({f"{block}.{name}": p for name, p in layer.trained().items()})
    trainable = {id(p) for p in view.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in found.values()}, "trainables and declarations differ"
    return found


def adapted_layers(view: Any, blocks: Iterable[int]) -> Iterator[tuple[int, LoRALinear]]:
    """Yield the replaced Linears of some blocks, each with its block, in a fixed order."""
    for block in blocks:
        for place in PLACES:
            layer = getattr(getattr(view.blocks[block], place.owner), place.name)
            if isinstance(layer, LoRALinear):
                yield block, layer


def _changed(
    weight: Tensor,
    slices: tuple[str, ...],
    change: Mapping[str, Tensor],
    past: Sequence[Pairs],
    scale: float,
) -> Tensor:
    """Return a copy of the weight (slices * out, in) with change and products added in float64."""
    merged = weight.detach().double().clone()
    rows = dict(zip(slices, merged.chunk(len(slices)), strict=True))
    for module, dense in change.items():
        rows[module] += dense.to(merged.device, torch.float64)
    for pairs in past:
        for module, pair in pairs.items():
            rows[module] += scale * pair.product()
    return merged.to(weight.dtype)


def _check_shapes(
    linear: nn.Linear,
    place: AdaptedLinear,
    block: int,
    slices: tuple[str, ...],
    change: Mapping[str, Tensor],
    many: Sequence[Pairs],
) -> None:
    got = (linear.out_features // len(slices), linear.in_features)
    wanted = [tuple(dense.shape) for dense in change.values()]
    wanted += [(pair.B.shape[0], pair.A.shape[1]) for pairs in many for pair in pairs.values()]
    for shape in wanted:
        if shape != got:
            raise DataError(
                f"block {block}: the adapter of {place.owner}.{place.name} has shape {shape}, "
                f"the backbone's Linear {got}.",
                action="Choose a backbone with plain MLPs, or leave this module out.",
            )
