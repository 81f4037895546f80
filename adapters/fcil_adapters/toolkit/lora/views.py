"""Views of the backbone with LoRA to train, or merged (torch; `lora.manifest`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.lora.layer import attach, read_pairs
from fcil_adapters.toolkit.lora.options import LoraHparams

Dense = Callable[[str], Tensor | None]  # place -> further dense change of its weight, (out, in)


def _nothing(_place: str) -> None:
    return None


def training_view(
    backbone: Backbone,
    h: LoraHparams,
    lora: Mapping[str, F32],
    dense: Dense = _nothing,
    round_: int = 0,
) -> Any:
    """Return a view on W + dense with LoRA to train in a round; the backbone stays untouched."""
    view = backbone.view()
    for block in h.blocks:
        added = {m: dense(f"{block}.{m}") for m in h.modules}
        attach(
            view,
            block,
            change={m: h.scale * D for m, D in added.items() if D is not None},
            current=read_pairs(lora, block, backbone.device, h.modules),
            scale=h.scale,
            train=h.factors_of(round_),
        )
    return view


def merged_view(
    backbone: Backbone, h: LoraHparams, lora: Mapping[str, F32], dense: Dense = _nothing
) -> Any:
    """Return a view on W + dense + B A, merged into copies of the adapted weights alone."""
    pairs = {
        f"{block}.{module}": pair
        for block in h.blocks
        for module, pair in read_pairs(lora, block, backbone.device, h.modules).items()
    }

    def change(place: str) -> Tensor:
        added, product = dense(place), pairs[place].product()  # (out, in), float64
        return product if added is None else added + product

    return changed_view(backbone, h, change)


def changed_view(backbone: Backbone, h: LoraHparams, change: Callable[[str], Tensor]) -> Any:
    """Return a view on W + scale * change, in copies of the adapted weights alone.

    Args:
        backbone: stays untouched.
        h: places and scale.
        change: place -> (out, in).
    """
    view = backbone.view()
    for block in h.blocks:
        changes: dict[str, Tensor] = {m: h.scale * change(f"{block}.{m}") for m in h.modules}
        attach(view, block, change=changes)
    return view
