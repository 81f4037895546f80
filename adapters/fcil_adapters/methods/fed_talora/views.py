"""Views of the backbone under the residuals so far, with LoRA to train or merged (torch)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fcil_adapters.backbone import Backbone
from fcil_adapters.lora import LoraPair, read_pair
from fcil_adapters.lora_linear import attach
from fcil_adapters.methods.fed_talora.history import total
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import Received


def training_view(backbone: Backbone, h: FedTaloraHparams, received: Received) -> Any:
    """Return a view on W + W_res (Eq. 5) with trainable LoRA, never on the backbone."""
    view = backbone.view()
    for block in h.blocks:
        change: dict[str, Tensor] = {}
        for module in h.modules:
            dense = total(f"{block}.{module}", received.base, received.residuals, backbone.device)
            if dense is not None:
                change[module] = h.scale * dense
        current: dict[str, LoraPair] = {
            m: read_pair(received.lora, f"{block}.{m}", backbone.device) for m in h.modules
        }
        attach(view, block, change=change, current=current, scale=h.scale, train_a=not h.freeze_a)
    return view


def merged_view(backbone: Backbone, h: FedTaloraHparams, received: Received) -> Any:
    """Return a view on W + W_res + B A, merged into copies of the adapted weights alone."""
    view = backbone.view()
    for block in h.blocks:
        change: dict[str, Tensor] = {
            m: h.scale * _effective(received, block, m, backbone.device) for m in h.modules
        }
        attach(view, block, change=change, current={})
    return view


def _effective(received: Received, block: int, module: str, device: str) -> Tensor:
    """Return all that is added to a weight, before the scale, in float64 (out, in)."""
    place = f"{block}.{module}"
    product = read_pair(received.lora, place, device).product()
    dense = total(place, received.base, received.residuals, device)
    return product if dense is None else dense + product
