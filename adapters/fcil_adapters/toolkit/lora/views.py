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
    backbone: Backbone, h: LoraHparams, lora: Mapping[str, F32], dense: Dense = _nothing
) -> Any:
    """Return a view on W + dense with trainable LoRA; the backbone itself stays untouched."""
    view = backbone.view()
    for block in h.blocks:
        added = {m: dense(f"{block}.{m}") for m in h.modules}
        attach(
            view,
            block,
            change={m: h.scale * D for m, D in added.items() if D is not None},
            current=read_pairs(lora, block, backbone.device, h.modules),
            scale=h.scale,
            train_a="A" in h.trained_factors,
        )
    return view


def merged_view(
    backbone: Backbone, h: LoraHparams, lora: Mapping[str, F32], dense: Dense = _nothing
) -> Any:
    """Return a view on W + dense + B A, merged into copies of the adapted weights alone."""
    view = backbone.view()
    for block in h.blocks:
        change: dict[str, Tensor] = {}
        for module, pair in read_pairs(lora, block, backbone.device, h.modules).items():
            added, product = dense(f"{block}.{module}"), pair.product()  # (out, in), float64
            change[module] = h.scale * (product if added is None else added + product)
        attach(view, block, change=change)
    return view
