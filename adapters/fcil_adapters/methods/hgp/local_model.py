"""A client's model in one of HGP's rounds: view, pools, queries, head rows (torch)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Array, Context, ImageSet
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.prompts.parts import PromptModel
from fcil_adapters.toolkit.prompts.prefix import PromptedView, Queries, with_pixels
from fcil_adapters.toolkit.training.optimise import I64


@dataclass(frozen=True)
class LocalModel:
    """A client's model in one round: a prompted view, the pools, the current task's head rows."""

    h: HgpHparams
    backbone: Backbone
    view: PromptedView
    pools: Pools
    queries: Queries
    weight: nn.Parameter  # (c, d)
    bias: nn.Parameter  # (c,)

    @classmethod
    def of(cls, ctx: Context, known: PromptModel, data: ImageSet) -> LocalModel:
        """Lay out a broadcast; the head's rows are those of the task's classes."""
        h: HgpHparams = ctx.hparams
        backbone = with_pixels(ctx.backbone, h.pixels)
        rows = class_positions(np.asarray(ctx.task.classes), known.head.classes.tolist())
        return cls(
            h=h,
            backbone=backbone,
            view=PromptedView(backbone, h.blocks),
            pools=Pools.of(h, known.prompts, backbone.device),
            queries=Queries(backbone, data, h.query, ctx.micro_batch or h.batch_size),
            weight=nn.Parameter(to_torch(known.head.weight[rows], backbone.device)),
            bias=nn.Parameter(to_torch(known.head.bias[rows], backbone.device)),
        )

    @property
    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The trained parameters: prompts and keys, and the head's rows."""
        return list(self.pools.tasks.current.values()), [self.weight, self.bias]

    def features(self, index: I64, pixels: Tensor) -> Tensor:
        """Return the prompted features (B, d) of the images ``index`` (B,), seen as pixels."""
        return self.prompted(self.queries.of(index, pixels), pixels)

    def prompted(self, queries: Tensor, pixels: Tensor) -> Tensor:
        """Return the features (B, d) with the prompts that the queries (B, d) choose."""
        return self.view.forward(self.backbone.normalise(pixels), self.pools.prompts(queries))

    def trained(self) -> dict[str, Array]:
        """Return what the server averages."""
        pools: dict[str, Array] = {n: to_numpy(p) for n, p in self.pools.tasks.current.items()}
        return {**pools, "head.weight": to_numpy(self.weight), "head.bias": to_numpy(self.bias)}
