"""HGP's client half: train prompts and head rows, then describe the classes (torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.nn import functional

from fcil_adapters.augment import augment
from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, Progress, State
from fcil_adapters.gaussians import describe, pack_gaussians
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import Global, read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.prompts import PromptedView, Queries
from fcil_adapters.statistics import class_positions
from fcil_protocol.payload import Array, Payload

_BATCHES = 1  # purpose of the random stream that orders and augments images


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the task's prompts, keys and head rows; send them with the classes' Gaussians."""
        bench = _Bench.of(ctx, read_parts(broadcast), data)
        # The cross-entropy of a single column is 0, whatever the prompts: nothing to train,
        # and the server takes the head's row from the class mean.
        if len(ctx.task.classes) > 1:
            _train(ctx, bench, data)
        return state, Payload({**bench.trained(), **_facts(ctx, bench, data)})


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
    def of(cls, ctx: Context, known: Global, data: ImageSet) -> _Bench:
        h: HgpHparams = ctx.hparams
        backbone: Backbone = ctx.backbone
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

    def features(self, index: NDArray[np.int64], pixels: Tensor) -> Tensor:
        """Return the prompted features (B, d) of the images ``index`` (B,), seen as pixels."""
        prompts = self.pools.prompts(self.queries.of(index, pixels))
        return self.view.forward(self.backbone.normalise(pixels), prompts)

    def trained(self) -> dict[str, Array]:
        """Return what the server averages."""
        pools: dict[str, Array] = {n: to_numpy(p) for n, p in self.pools.current.items()}
        return {**pools, "head.weight": to_numpy(self.weight), "head.bias": to_numpy(self.bias)}


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    h = bench.h
    rates = (h.lr_prompt, h.lr_head)
    optimiser = torch.optim.Adam(
        [
            {"params": list(bench.pools.current.values()), "lr": rates[0]},
            {"params": [bench.weight, bench.bias], "lr": rates[1]},
        ]
    )
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    steps = h.epochs * math.ceil(len(data) / h.batch_size)
    for step, index in enumerate(_batches(len(data), h, generator)):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * _schedule(h, step, steps)
        optimiser.zero_grad()
        loss = _backward(ctx, bench, data, index, generator)
        optimiser.step()
        ctx.progress(Progress(step + 1, steps, loss))


def _backward(
    ctx: Context, bench: _Bench, data: ImageSet, index: NDArray[np.int64], generator: Generator
) -> float:
    """Add the gradient of one batch's mean cross-entropy over the task's classes.

    The batch may pass in several micro-batches; the views are drawn for the whole batch
    first, and every image counts 1 / B, so the gradient is the same.
    """
    pixels = augment(to_torch(data.take(index)), bench.h.augment, generator)  # (B, S, S, 3)
    target = class_positions(data.labels[index], ctx.task.classes)  # (B,)
    micro = ctx.micro_batch or len(index)
    total = 0.0
    for start in range(0, len(index), micro):
        part = slice(start, start + micro)
        features = bench.features(index[part], pixels[part])  # (b, d)
        logits = functional.linear(features, bench.weight, bench.bias)  # (b, c)
        columns = to_torch(target[part], logits.device)
        loss = functional.cross_entropy(logits, columns, reduction="sum") / len(index)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _facts(ctx: Context, bench: _Bench, data: ImageSet) -> dict[str, Array]:
    """Return image counts and Gaussians of the trained, local model on plain images."""
    h = bench.h
    rows = class_positions(data.labels, ctx.task.classes)  # (N,)
    counts = np.bincount(rows, minlength=len(ctx.task.classes)).astype(np.int64)  # (c,)
    features = _plain_features(ctx, bench, data)  # (N, d)
    owned = np.flatnonzero(counts >= h.min_count_upload)
    gaussians = [describe(features[rows == c], h.cov, h.cov_rank) for c in owned]
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
    for start in range(0, len(data), size):
        index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
        with torch.no_grad():
            chunks.append(to_numpy(bench.features(index, to_torch(data.take(index)))))
        if len(ctx.task.classes) == 1:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return np.concatenate(chunks)


def _schedule(h: HgpHparams, step: int, steps: int) -> float:
    """Return the factor of both rates at a step (from 0) of a round's local training."""
    return 1.0 if h.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(count: int, h: HgpHparams, generator: Generator) -> Iterator[NDArray[np.int64]]:
    for _ in range(h.epochs):
        order = torch.randperm(count, generator=generator).numpy()
        for start in range(0, count, h.batch_size):
            yield order[start : start + h.batch_size]
