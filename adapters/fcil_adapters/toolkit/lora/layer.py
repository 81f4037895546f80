"""Low-rank adapters on any Linear of a block, with a dense change of its frozen weight (torch).

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022,
https://arxiv.org/abs/2106.09685. `qv_layer` covers q and v alone and sums of factors; here each of
q, v, fc1 and fc2 can be adapted, and the accumulated change of the weight may be dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.toolkit.lora.qv_layer import LoraPair
from fcil_protocol.errors import DataError


@dataclass(frozen=True)
class AdaptedLinear:
    """A Linear of a block that holds adapted modules.

    Attributes:
        owner, name: its path: ``block.<owner>.<name>``.
        slices: names of the equal slices of its output.
    """

    owner: str
    name: str
    slices: tuple[str, ...]


# timm computes q, k and v of a block by one Linear (d -> 3d)
PLACES = (
    AdaptedLinear("attn", "qkv", ("q", "k", "v")),
    AdaptedLinear("mlp", "fc1", ("fc1",)),
    AdaptedLinear("mlp", "fc2", ("fc2",)),
)


class LoRALinear(nn.Module):
    """A shared, frozen Linear with a dense change and perhaps a trainable pair per slice.

    The output slice of a module with change D and pair (A, B) is

        (W + D) x + b + scale * B A x

    The changes are merged once into a copy of W that belongs to this module; without any, the
    shared W itself is used.

    Args:
        linear: the Linear (in -> slices * out); neither modified nor copied.
        slices: names of the equal slices of its output.
        change: module -> D, (out, in).
        current: module -> start values of its pair, A (r, in) and B (out, r).
        scale: factor of B A.
        train_a: False keeps A as it is (FFA-LoRA).
    """

    def __init__(
        self,
        linear: nn.Linear,
        slices: tuple[str, ...],
        *,
        change: Mapping[str, Tensor],
        current: Mapping[str, LoraPair],
        scale: float = 1.0,
        train_a: bool = True,
    ) -> None:
        super().__init__()
        assert linear.out_features % len(slices) == 0, "slices are not equal"
        self.bias = linear.bias
        self.weight = _changed(linear.weight, slices, change) if change else linear.weight
        self.slices = slices
        self.scale = scale
        self.pairs = nn.ModuleDict()
        for module, pair in current.items():
            A = nn.Parameter(pair.A.detach().float().clone(), requires_grad=train_a)
            B = nn.Parameter(pair.B.detach().float().clone())
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
            low = functional.linear(x, pair["A"])  # (..., r)
            i = self.slices.index(module)
            outputs[i] = outputs[i] + self.scale * functional.linear(low, pair["B"])
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    def _pairs(self) -> dict[str, Any]:
        return dict(self.pairs.items())


def attach(
    view: Any,
    block: int,
    *,
    change: Mapping[str, Tensor],
    current: Mapping[str, LoraPair],
    scale: float = 1.0,
    train_a: bool = True,
) -> None:
    """Replace the Linears of one block of a backbone view that ``change`` or ``current`` names.

    Args:
        view: a view of its own (`Backbone.view`).
        block: index of the block.
        change: module -> dense change of its weight, (out, in).
        current: module -> trainable pair.
        scale: factor of B A.
        train_a: False keeps A as it is.

    Raises:
        DataError: the backbone's Linear has another shape than the change or the pair.
    """
    for place in PLACES:
        changes = {m: change[m] for m in place.slices if m in change}
        pairs = {m: current[m] for m in place.slices if m in current}
        if not changes and not pairs:
            continue
        owner = getattr(view.blocks[block], place.owner)
        linear = getattr(owner, place.name)
        _check_shapes(linear, place, block, changes, pairs)
        layer = LoRALinear(
            linear, place.slices, change=changes, current=pairs, scale=scale, train_a=train_a
        )
        setattr(owner, place.name, layer)


def trained_params(view: Any, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
    """Collect the declared trainables of the adapted blocks: ``0.fc1.A`` -> parameter.

    Fails if the view holds a trainable parameter that no layer declared, or the reverse.
    """
    found: dict[str, nn.Parameter] = {}
    for block in blocks:
        for place in PLACES:
            layer = getattr(getattr(view.blocks[block], place.owner), place.name)
            if isinstance(layer, LoRALinear):
                found.update({f"{block}.{name}": p for name, p in layer.trained().items()})
    trainable = {id(p) for p in view.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in found.values()}, "trainables and declarations differ"
    return found


def _changed(weight: Tensor, slices: tuple[str, ...], change: Mapping[str, Tensor]) -> Tensor:
    """Return a copy of the weight (slices * out, in) with the changes added in float64."""
    merged = weight.detach().double().clone()
    out = weight.shape[0] // len(slices)
    for module, dense in change.items():
        first = slices.index(module) * out
        merged[first : first + out] += dense.to(merged.device, torch.float64)
    return merged.to(weight.dtype)


def _check_shapes(
    linear: nn.Linear,
    place: AdaptedLinear,
    block: int,
    changes: Mapping[str, Tensor],
    pairs: Mapping[str, LoraPair],
) -> None:
    got = (linear.out_features // len(place.slices), linear.in_features)
    wanted = [tuple(dense.shape) for dense in changes.values()]
    wanted += [(pair.B.shape[0], pair.A.shape[1]) for pair in pairs.values()]
    for shape in wanted:
        if shape != got:
            raise DataError(
                f"block {block}: the adapter of {place.owner}.{place.name} has shape {shape}, "
                f"the backbone's Linear {got}.",
                action="Choose a backbone with plain MLPs, or leave this module out.",
            )
