"""Views of the backbone with LoRA to train, or merged (torch; `lora.manifest`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.lora.layer import attach
from fcil_adapters.toolkit.lora.options import LoraHparams
from fcil_adapters.toolkit.lora.qv_layer import LoraPair, read_pair

Dense = Callable[[str], Tensor | None]  # place -> further dense change of its weight, (out, in)


def _nothing(_place: str) -> None:
    return None


def training_view(
    backbone: Backbone, h: LoraHparams, lora: Mapping[str, F32], dense: Dense = _nothing
) -> Any:
    """Return a view on W + dense with trainable LoRA; the backbone itself stays untouched."""
    view = backbone.view()
    for block in h.blocks:
        change: dict[str, Tensor] = {}
        for module in h.modules:
            added = dense(f"{block}.{module}")
            if added is not None:
                change[module] = h.scale * added
        current: dict[str, LoraPair] = {
            m: read_pair(lora, f"{block}.{m}", backbone.device) for m in h.modules
        }
        attach(
            view, block, change=change, current=current, scale=h.scale,
            train_a="A" in h.trained_factors,
        )  # fmt: skip
    return view


def merged_view(
    backbone: Backbone, h: LoraHparams, lora: Mapping[str, F32], dense: Dense = _nothing
) -> Any:
    """Return a view on W + dense + B A, merged into copies of the adapted weights alone."""
    view = backbone.view()
    for block in h.blocks:
        change: dict[str, Tensor] = {}
        for module in h.modules:
            place = f"{block}.{module}"
            product = read_pair(lora, place, backbone.device).product()  # (out, in), float64
            added = dense(place)
            change[module] = h.scale * (product if added is None else added + product)
        attach(view, block, change=change, current={})
    return view
