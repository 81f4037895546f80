"""A client's passes over its images: batch order, steps over a task's rounds, class sums (torch).

Everything random comes from an explicit generator, everything else from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, Progress
from fcil_adapters.statistics import class_means, class_positions, class_sums

I64 = NDArray[np.int64]


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


def cosine_factor(round_: int, rounds: int) -> float:
    """Return the factor of the step size in a round (from 0) of a task's ``rounds``."""
    return 0.5 * (1 + math.cos(math.pi * round_ / rounds))


def class_counts(data: ImageSet, classes: Sequence[int]) -> I64:
    """Return how many images of each class there are: (c,)."""
    rows = class_positions(data.labels, classes)
    return np.bincount(rows, minlength=len(classes)).astype(np.int64)


@dataclass(frozen=True)
class FeatureSums:
    """Sums of features by class; they add up over batches.

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

    def plus(self, features: Tensor, labels: I64, classes: Sequence[int]) -> FeatureSums:
        """Return the sums with a batch's features (B, d) added."""
        sums, counts = class_sums(to_numpy(features), labels, classes)
        return FeatureSums(self.sums + sums, self.counts + counts)

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

    Args:
        ctx: micro-batch, task and progress.
        features: images (B, S, S, 3) in [0, 255] -> (B, d).
        data: the images.
        batch_size: images per pass if the context sets no micro-batch.
        report: whether to tell the context's progress.
    """
    running = FeatureSums.zero(len(ctx.task.classes), ctx.backbone_info.dim)
    size = ctx.micro_batch or batch_size
    for start in range(0, len(data), size):
        index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
        with torch.no_grad():
            batch = features(to_torch(data.take(index)))
        running = running.plus(batch, data.labels[index], ctx.task.classes)
        if report:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return running
