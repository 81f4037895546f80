"""PLoRA's views of the backbone: the adapted one, and the teacher's, cut at its last block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone, cls_features, leading_tokens
from fcil_adapters.methods.plora.options import PloraHparams
from fcil_adapters.toolkit.lora.layer import attach, read_pairs

Lora = Mapping[str, NDArray[np.float32]]


def merged_view(backbone: Backbone, h: PloraHparams, lora: Lora) -> Any:
    """Return a view with the LoRA merged into copies of the weights (Eq. 3)."""
    view = backbone.view()
    for block in h.blocks:
        attach(view, block, past=[read_pairs(lora, block, backbone.device)], scale=h.scale)
    return view


def training_view(backbone: Backbone, h: PloraHparams, lora: Lora) -> Any:
    """Return a view in which the LoRA is trainable (Eq. 3)."""
    view = backbone.view()
    for block in h.blocks:
        attach(view, block, current=read_pairs(lora, block, backbone.device), scale=h.scale)
    return view


class Teacher:
    """The previous task's model up to the last adapted block, frozen (Eq. 11).

    The blocks above never run: distillation compares the output of that block.
    """

    def __init__(self, backbone: Backbone, h: PloraHparams, lora: Lora) -> None:
        self._view = merged_view(backbone, h, lora)
        self._view.blocks = self._view.blocks[: max(h.blocks) + 1]
        self._view.norm = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        """Return the class token after the last adapted block for input (B, 3, S, S): (B, d)."""
        tokens: Tensor = leading_tokens(self._view, x)  # (B, tokens, d)
        return tokens[:, 0]


class Student:
    """The trained view; its forward pass also gives the output to compare with the teacher's."""

    def __init__(self, view: Any, h: PloraHparams) -> None:
        self.view = view
        self._tapped: list[Tensor] = []
        view.blocks[max(h.blocks)].register_forward_hook(self._tap)

    def _tap(self, _block: nn.Module, _inputs: Any, tokens: Tensor) -> None:
        self._tapped = [tokens[:, 0]]

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the feature and the class token after the last adapted block, both (B, d)."""
        features = cls_features(self.view, x)
        return features, self._tapped.pop()
