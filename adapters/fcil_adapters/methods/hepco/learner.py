"""HePCo's client half: train prompt pools, keys and the task's head rows (torch)."""

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
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, Progress, State
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.parts import HEAD, GlobalModel, read_parts, upload
from fcil_adapters.methods.hepco.prompting import PromptedModel
from fcil_adapters.prompts import Queries, query_features
from fcil_adapters.statistics import class_positions
from fcil_protocol.payload import Array, Payload

_BATCHES = 1  # purpose of the random stream that orders and augments images


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train on local images; in a task of a single class send its mean feature as head row.

        With one class the softmax has one column and no gradient; prompts and keys then go
        back as they came, and the server makes a head row of the clients' means.
        """
        bench = _Bench.of(ctx, read_parts(broadcast))
        if len(ctx.task.classes) > 1:
            _train(ctx, bench, data)
        else:
            _set_mean_row(ctx, bench, data)
        trained: dict[str, Array] = {name: to_numpy(p) for name, p in bench.trained.items()}
        rows = class_positions(data.labels, ctx.task.classes)
        counts = np.bincount(rows, minlength=len(ctx.task.classes)).astype(np.int64)
        return state, upload(trained, ctx.task.classes, counts)


@dataclass(frozen=True)
class _Bench:
    """What one round works on.

    Attributes:
        trained: pools and keys of all blocks, and the task's head rows (c, d) and (c,).
    """

    h: HepcoHparams
    model: PromptedModel
    trained: dict[str, nn.Parameter]

    @classmethod
    def of(cls, ctx: Context, start: GlobalModel) -> _Bench:
        head = {
            HEAD[0]: start.weight[len(start.classes) - start.current :],
            HEAD[1]: start.bias[len(start.classes) - start.current :],
        }
        device = ctx.backbone.device
        return cls(
            h=ctx.hparams,
            model=PromptedModel(ctx.backbone, ctx.hparams),
            trained={
                name: nn.Parameter(to_torch(array, device))
                for name, array in {**start.pools, **head}.items()
            },
        )

    def logits(self, features: Tensor) -> Tensor:
        """Score features (B, d) over the current task's classes alone: (B, c)."""
        weight, bias = (self.trained[name] for name in HEAD)
        return functional.linear(features, weight, bias)


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Run the local epochs; Adam starts anew in each round."""
    h = bench.h
    queries = Queries(bench.model.backbone, data, h.query, ctx.micro_batch or h.batch_size)
    optimiser = torch.optim.Adam(bench.trained.values(), lr=h.lr)
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    steps = h.epochs * math.ceil(len(data) / h.batch_size)
    done = 0
    for epoch in range(h.epochs):
        for group in optimiser.param_groups:
            group["lr"] = h.lr * schedule_factor(h, epoch)
        for index in _batches(len(data), h.batch_size, generator):
            optimiser.zero_grad()
            loss = _backward(ctx, bench, data, index, queries, generator)
            optimiser.step()
            done += 1
            ctx.progress(Progress(done, steps, loss))


def schedule_factor(h: HepcoHparams, epoch: int) -> float:
    """Return the factor of Adam's step in an epoch: cos(99 pi e / (200 (E - 1)))."""
    if h.schedule == "constant" or h.epochs == 1:
        return 1.0
    return math.cos(99 * math.pi * epoch / (200 * (h.epochs - 1)))


def _backward(
    ctx: Context,
    bench: _Bench,
    data: ImageSet,
    index: NDArray[np.int64],
    queries: Queries,
    generator: Generator,
) -> float:
    """Add the gradient of one batch's mean cross-entropy over the task's classes; return it.

    The batch may pass in several micro-batches; the views are drawn for the whole batch
    first, and every image counts 1 / B, so the gradient is the same.
    """
    pixels = augment(to_torch(data.take(index)), bench.h.augment, generator)  # (B, S, S, 3)
    target = class_positions(data.labels[index], ctx.task.classes)  # (B,)
    total = 0.0
    micro = ctx.micro_batch or len(index)
    for first in range(0, len(index), micro):
        some = slice(first, first + micro)
        chosen = queries.of(index[some], pixels[some])  # (b, d)
        pools = {name: p for name, p in bench.trained.items() if name not in HEAD}
        logits = bench.logits(bench.model.features(pixels[some], chosen, pools))  # (b, c)
        own = functional.one_hot(to_torch(target[some], logits.device), logits.shape[1])
        # A product instead of gather: gather's gradient is not deterministic on GPUs.
        loss = -(logits.log_softmax(1) * own).sum() / len(index)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _set_mean_row(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Make the only head row the mean prompted feature of the images, with bias 0."""
    pools = {name: p for name, p in bench.trained.items() if name not in HEAD}
    weight, bias = (bench.trained[name] for name in HEAD)
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)  # (d,)
    size = ctx.micro_batch or bench.h.batch_size
    with torch.no_grad():
        for first in range(0, len(data), size):
            index = np.arange(first, min(first + size, len(data)), dtype=np.int64)
            pixels = to_torch(data.take(index))
            chosen = query_features(bench.model.backbone, pixels)
            total += bench.model.features(pixels, chosen, pools).double().sum(0)
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
        weight.copy_(total / max(len(data), 1))
        bias.zero_()


def _batches(count: int, size: int, generator: Generator) -> Iterator[NDArray[np.int64]]:
    order = torch.randperm(count, generator=generator).numpy()
    for start in range(0, count, size):
        yield order[start : start + size]
