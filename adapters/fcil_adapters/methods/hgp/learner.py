"""HGP's client half: train prompts and head rows, then describe the classes (torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Array, Context, ImageSet, Payload, Progress, State
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.gaussians.gaussian import pack_gaussians
from fcil_adapters.toolkit.gaussians.noised import describe_with
from fcil_adapters.toolkit.prompts.parts import PromptModel
from fcil_adapters.toolkit.prompts.prefix import PromptedView, Queries, with_pixels
from fcil_adapters.toolkit.training.optimise import I64, Batch, class_counts, optimise
from fcil_adapters.toolkit.training.prefetch import plain_batches


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the task's prompts, keys and head rows; send them with the classes' Gaussians."""
        bench = _Bench.of(ctx, read_parts(broadcast), data)
        # Noise covers features of the model as it came: trained here, it depends on each image.
        facts = _facts(ctx, bench, data) if ctx.privacy.on else None
        # The cross-entropy of a single column is 0, whatever the prompts: nothing to train,
        # and the server takes the head's row from the class mean.
        if len(ctx.task.classes) > 1:
            _train(ctx, bench, data)
        return state, Payload({**bench.trained(), **(facts or _facts(ctx, bench, data))})


@dataclass(frozen=True)
class _Bench:
    """What one round works on: a prompted view, the pools, the current task's head rows."""

    h: HgpHparams
    backbone: Backbone
    view: PromptedView
    pools: Pools
    queries: Queries
    weight: nn.Parameter  # (c, d)
    bias: nn.Parameter  # (c,)

    @classmethod
    def of(cls, ctx: Context, known: PromptModel, data: ImageSet) -> _Bench:
        h: HgpHparams = ctx.hparams
        backbone = with_pixels(ctx.backbone, h.pixels)
        rows = class_positions(np.asarray(ctx.task.classes), known.classes.tolist())
        return cls(
            h=h,
            backbone=backbone,
            view=PromptedView(backbone, h.blocks),
            pools=Pools.of(h, known.prompts, backbone.device),
            queries=Queries(backbone, data, h.query, ctx.micro_batch or h.batch_size),
            weight=nn.Parameter(to_torch(known.weight[rows], backbone.device)),
            bias=nn.Parameter(to_torch(known.bias[rows], backbone.device)),
        )

    @property
    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """What is trained: prompts and keys, and the head's rows."""
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


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Run the local epochs; Adam starts anew in each round."""
    h = bench.h
    rates = (h.lr_prompt, h.lr_head)
    optimiser = torch.optim.Adam(
        [{"params": some, "lr": lr} for some, lr in zip(bench.parameters, rates, strict=True)]
    )

    def objective(batch: Batch) -> None:
        _backward(bench, batch)

    def factor(step: int, steps: int) -> float:
        return _schedule(h, step, steps)

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size,
        view=h.augment, factor=factor, clip_norm=h.clip_norm,
    )  # fmt: skip


def _backward(bench: _Bench, batch: Batch) -> None:
    """Add the gradient of one batch's mean cross-entropy over the task's classes."""
    for piece in batch.pieces():
        queries = bench.queries.of(piece.index, piece.pixels)  # (b, d)
        with bench.backbone.training():
            features = bench.prompted(queries, piece.pixels)
        logits = functional.linear(features.float(), bench.weight, bench.bias)  # (b, c)
        loss = functional.cross_entropy(logits, piece.rows, reduction="sum")
        batch.backward(loss / len(batch))


def _facts(ctx: Context, bench: _Bench, data: ImageSet) -> dict[str, Array]:
    """Return image counts, and Gaussians of the model as it is now on plain images."""
    h = bench.h
    rows = class_positions(data.labels, ctx.task.classes)  # (N,)
    counts = class_counts(data, ctx.task.classes)  # (c,)
    features = _plain_features(ctx, bench, data)  # (N, d)
    owned = np.flatnonzero(counts >= h.min_count_upload)
    gaussians = [describe_with(ctx.privacy, features[rows == c], h.cov, h.cov_rank) for c in owned]
    return {
        **pack_gaussians(gaussians, features.shape[1], h.cov),
        "classes": np.asarray(ctx.task.classes, dtype=np.int64),
        "count": counts,
        "n": counts.sum(dtype=np.int64).reshape(1),
    }


def _plain_features(ctx: Context, bench: _Bench, data: ImageSet) -> NDArray[np.float32]:
    """Return the features (N, d) of all images as they are."""
    size = ctx.micro_batch or bench.h.batch_size
    chunks = [np.zeros((0, bench.weight.shape[1]), dtype=np.float32)]
    for index, pixels in plain_batches(data, size, ctx.device):
        with torch.no_grad():
            chunks.append(to_numpy(bench.features(index, pixels)))
        if len(ctx.task.classes) == 1:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return np.concatenate(chunks)


def _schedule(h: HgpHparams, step: int, steps: int) -> float:
    """Return the factor of both rates at a step (from 0) of a round's local training."""
    return 1.0 if h.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))
