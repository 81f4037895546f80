"""Views of the backbone under the residuals so far, with LoRA to train or merged (torch)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.methods.fed_talora.history import total
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import Received
from fcil_adapters.toolkit.lora import views


def training_view(backbone: Backbone, h: FedTaloraHparams, received: Received) -> Any:
    """Return a view on W + W_res (Eq. 5) with trainable LoRA; the backbone stays untouched."""
    dense = partial(_residual, received, backbone.device)
    return views.training_view(backbone, h, received.lora, dense)


def merged_view(backbone: Backbone, h: FedTaloraHparams, received: Received) -> Any:
    """Return a view on W + W_res + B A, merged into copies of the adapted weights alone."""
    dense = partial(_residual, received, backbone.device)
    return views.merged_view(backbone, h, received.lora, dense)


def _residual(received: Received, device: str, place: str) -> Tensor | None:
    """Return W_res of a place, before the scale, in float64 (out, in)."""
    return total(place, received.base, received.residuals, device)
