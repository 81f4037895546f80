"""The frozen backbone with one pool of prompts per block, as HePCo trains and uses it (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fcil_adapters.backbone import Backbone
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.prompts import PromptedView, select, with_pixels

Pools = Mapping[str, Tensor]  # ``prompt.<block>`` (M, L, d) and ``key.<block>`` (M, d)


class PromptedModel:
    """A view of the backbone in which each block's prompt is mixed from its pool.

    Attributes:
        backbone: computes the queries and prepares the pixels as ``pixels`` says; it shares
            its module with the one given.
    """

    def __init__(self, backbone: Backbone, h: HepcoHparams) -> None:
        self.backbone = with_pixels(backbone, h.pixels)
        self._blocks = h.blocks
        self._view = PromptedView(self.backbone, h.blocks)

    def features(self, pixels: Tensor, queries: Tensor, pools: Pools) -> Tensor:
        """Return the prompted features (B, d).

        Args:
            pixels: (B, S, S, 3) in [0, 255].
            queries: (B, d), by which the prompts are chosen.
            pools: `Pools`; gradients flow to them.
        """
        prompts = {
            b: select(queries, pools[f"key.{b}"], pools[f"prompt.{b}"]) for b in self._blocks
        }
        return self._view.forward(self.backbone.normalise(pixels), prompts)
