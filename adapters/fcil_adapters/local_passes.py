"""A client's passes over its images: batches, steps of an optimiser, class sums (torch).

Everything random comes from an explicit generator, everything else from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.augment import Augmentation, augment
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, Progress
from fcil_adapters.statistics import class_means, class_positions

I64 = NDArray[np.int64]

Schedule = Literal["cosine", "cosine_repeat", "constant"]

_BATCHES = 1  # purpose of the random stream that orders and augments images


def shuffled_batches(
    count: int, *, epochs: int, batch_size: int, generator: Generator
) -> Iterator[I64]:
    """Yield the batches of all epochs, as indices; each epoch has an order of its own."""
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).numpy()
        for start in range(0, count, batch_size):
            yield order[start : start + batch_size]


def step_count(count: int, *, epochs: int, batch_size: int) -> int:
    """Return how many batches `shuffled_batches` yields."""
    return epochs * math.ceil(count / batch_size)


def optimise(
    ctx: Context,
    data: ImageSet,
    optimiser: torch.optim.Optimizer,
    objective: Callable[[I64, Generator], float],
    *,
    epochs: int,
    batch_size: int,
    factor: Callable[[int, int], float] | None = None,
) -> None:
    """Make one step per batch of all epochs, and tell the context's progress.

    Args:
        ctx: seed and progress.
        data: the images.
        optimiser: of the parameters whose gradients the objective adds to.
        objective: (indices of a batch, generator for its views) -> value; adds the gradient.
        epochs: passes over all images.
        batch_size: images per step.
        factor: (step from 0, steps) -> factor of the optimiser's step sizes; None: constant.
    """
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    sizes = {"epochs": epochs, "batch_size": batch_size}
    steps = step_count(len(data), **sizes)
    rates = [group["lr"] for group in optimiser.param_groups]
    for step, index in enumerate(shuffled_batches(len(data), **sizes, generator=generator)):
        if factor is not None:
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step, steps)
        optimiser.zero_grad()
        loss = objective(index, generator)
        optimiser.step()
        ctx.progress(Progress(step + 1, steps, loss))


def micro_batches(
    ctx: Context, data: ImageSet, index: I64, view: Augmentation, generator: Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch in pieces of at most ``ctx.micro_batch`` images.

    The views are drawn for the whole batch first. If every image counts 1 / B in the pieces'
    objectives, the sum of the gradients is that of the batch at once.

    Yields:
        Random views (b, S, S, 3) in [0, 255], and the images' positions in the task's classes
        (b,), both on the CPU.
    """
    pixels = augment(to_torch(data.take(index)), view, generator)  # (B, S, S, 3)
    rows = to_torch(class_positions(data.labels[index], ctx.task.classes))  # (B,)
    size = ctx.micro_batch or len(index)
    yield from zip(torch.split(pixels, size), torch.split(rows, size), strict=True)


def schedule_factor(schedule: Schedule, round_: int, rounds: int) -> float:
    """Return the factor of the step size in a round (from 0) of a task's ``rounds``.

    ``cosine``: (1 + cos(pi e / E)) / 2 in round e of E; ``cosine_repeat``: the same one round
    later, so that the first factor is used twice.
    """
    if schedule == "constant":
        return 1.0
    e = max(round_ - 1, 0) if schedule == "cosine_repeat" else round_
    return 0.5 * (1 + math.cos(math.pi * e / rounds))


def class_counts(data: ImageSet, classes: Sequence[int]) -> I64:
    """Return how many images of each class there are: (c,)."""
    rows = class_positions(data.labels, classes)
    return np.bincount(rows, minlength=len(classes)).astype(np.int64)


@dataclass(frozen=True)
class FeatureSums:
    """Sums of features by class, added up batch by batch.

    Attributes:
        sums: (c, d).
        counts: (c,).
    """

    sums: NDArray[np.float64]
    counts: I64

    @classmethod
    def zero(cls, c: int, d: int) -> FeatureSums:
        """Return the sums over no image."""
        return cls(np.zeros((c, d)), np.zeros(c, dtype=np.int64))

    def add(self, features: NDArray[Any], rows: I64) -> None:
        """Add features (B, d) of images whose classes stand at ``rows`` (B,)."""
        np.add.at(self.sums, rows, features.astype(np.float64))
        np.add.at(self.counts, rows, 1)

    @property
    def means(self) -> NDArray[np.float64]:
        """The class means, (c, d); zero for a class without images."""
        return class_means(self.sums, self.counts)


def sum_features(
    ctx: Context,
    features: Callable[[Tensor], Tensor],
    data: ImageSet,
    *,
    batch_size: int,
    report: bool,
) -> FeatureSums:
    """Sum the features of all images as they are, by class of the task, without a gradient.

    The sums are clipped and noised as ``ctx.privacy`` says, so each call is one more release.

    Args:
        ctx: micro-batch, task, privacy and progress.
        features: images (B, S, S, 3) in [0, 255] -> (B, d).
        data: the images.
        batch_size: images per pass if the context sets no micro-batch.
        report: whether to tell the context's progress.
    """
    running = FeatureSums.zero(len(ctx.task.classes), ctx.backbone_info.dim)
    rows = class_positions(data.labels, ctx.task.classes)  # (N,)
    size = ctx.micro_batch or batch_size
    for start in range(0, len(data), size):
        index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
        with torch.no_grad():
            batch = features(to_torch(data.take(index)))
        running.add(ctx.privacy.clipped(to_numpy(batch)), rows[index])
        if report:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return replace(running, sums=ctx.privacy.released_sums(running.sums, running.counts))
