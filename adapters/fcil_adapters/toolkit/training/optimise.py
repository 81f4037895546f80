"""A client's passes over its images: batches, steps of an optimiser, class sums (torch).

All randomness comes from an explicit generator, all else from the arguments.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.contract import Context, ImageSet, Progress, TrainingMetrics
from fcil_adapters.numerics.class_means import class_means, class_positions
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.training.augment import Augmentation, augment
from fcil_adapters.toolkit.training.prefetch import ahead, on_device, plain_batches
from fcil_protocol.errors import WorkerError

I64 = NDArray[np.int64]

Schedule = Literal["cosine", "cosine_repeat", "constant"]

LOSS_S = 0.5  # least time between two readings of a loss on a GPU

FIRST_SCALE = 2.0**10  # torch's 2**16 overflows in the first steps of each round
SCALE_GROWS = 100  # steps without overflow after which the scale of losses doubles

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


@dataclass(frozen=True)
class MicroBatch:
    """Images of a batch that pass through the model at once.

    Attributes:
        index: (b,), positions of the images in the set.
        pixels: random views (b, S, S, 3) in [0, 255], float32, on the backbone's device.
        rows: positions in the task's classes, or those given to `optimise`, (b,), there too.
    """

    index: I64
    pixels: Tensor
    rows: Tensor


@dataclass
class Batch:
    """The images of one step, and the terms of its objective so far.

    Attributes:
        whole: all its images; the views are drawn for the entire batch.
        micro: largest number of images in a piece; None: all.
        scaler: of losses, where fp16 could not hold their gradients.
    """

    whole: MicroBatch
    micro: int | None = None
    scaler: torch.amp.GradScaler | None = None
    _terms: list[Tensor] = field(default_factory=list)
    _right: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.whole.index)

    def pieces(self) -> Iterator[MicroBatch]:
        """Yield the batch in pieces.

        If every image counts 1 / B in the pieces' terms, the sum of the gradients is that of the
        batch at once.
        """
        size = self.micro or len(self)
        for i in range(0, len(self), size):
            part = slice(i, i + size)
            yield MicroBatch(self.whole.index[part], self.whole.pixels[part], self.whole.rows[part])

    def backward(self, term: Tensor) -> None:
        """Add the gradient of a term of the objective."""
        scaled = term if self.scaler is None else self.scaler.scale(term)
        scaled.backward()  # type: ignore[no-untyped-call]
        self._terms.append(term.detach())

    def backward_mean(self, losses: Callable[[MicroBatch], Tensor]) -> None:
        """Add the gradient of a mean over the images, piece by piece.

        Args:
            losses: a piece -> the sum of its images' losses, or the losses themselves (b,).
        """
        for piece in self.pieces():
            self.backward(losses(piece).sum() / len(self))

    def scored(self, scores: Tensor, piece: MicroBatch) -> None:
        """Note how many of a piece's images (b, c) have their own class as the likeliest.

        For the training accuracy; a method that does not call it has none.
        """
        self._right.append((scores.detach().argmax(1) == piece.rows).sum())

    @property
    def right(self) -> Tensor | None:
        """Number of images that `scored` counted, on the device; None: it was not called."""
        return torch.stack(self._right).sum() if self._right else None

    @property
    def terms(self) -> tuple[Tensor, ...]:
        """The terms of the objective so far, without gradients, on the device."""
        return tuple(self._terms)

    def value(self) -> float:
        """Return the sum of the terms; this waits for a GPU."""
        return sum((term.item() for term in self._terms), 0.0)


def optimise(
    ctx: Context,
    data: ImageSet,
    optimiser: torch.optim.Optimizer,
    objective: Callable[[Batch], None],
    *,
    epochs: int,
    batch_size: int,
    view: Augmentation,
    factor: Callable[[int, int], float] | None = None,
    clip_norm: float | None = None,
    classes: Sequence[int] | None = None,
) -> None:
    """Make one step per batch of all epochs, and report to the context's progress.

    The next batch is loaded while a step is computed; its order and views do not depend on that.
    With fp16 a step whose gradients overflow is left out.

    Args:
        ctx: seed, backbone, micro-batch and progress.
        data: the images.
        optimiser: of the parameters whose gradients the objective adds to.
        objective: calls `Batch.backward` with the terms of a batch.
        epochs: passes over all images.
        batch_size: images per step.
        view: kind of the random views for training.
        factor: (step from 0, steps) -> factor of the optimiser's step sizes; None: constant.
        clip_norm: largest length of a batch's gradient; None: no bound.
        classes: the classes whose positions are a piece's rows; None: the task's classes.

    Raises:
        WorkerError: all steps were left out: nothing was trained.
    """
    steps = step_count(len(data), epochs=epochs, batch_size=batch_size)
    rates = [group["lr"] for group in optimiser.param_groups]
    scaler = _scaler(ctx)
    due = _Due(ctx.device)
    made = 0
    among = ctx.task.classes if classes is None else classes
    last_epoch = _LastEpoch(steps - step_count(len(data), epochs=1, batch_size=batch_size))
    coming = ahead(_batches(ctx, data, among, epochs, batch_size, view))
    with contextlib.closing(coming):  # type: ignore[type-var]
        for step, whole in enumerate(coming):
            if factor is not None:
                for group, rate in zip(optimiser.param_groups, rates, strict=True):
                    group["lr"] = rate * factor(step, steps)
            batch = Batch(whole, ctx.micro_batch, scaler)
            optimiser.zero_grad()
            objective(batch)
            made += _step(optimiser, scaler, clip_norm)
            last_epoch.add(step, batch)
            loss = batch.value() if due(step + 1 == steps) else None
            ctx.progress(Progress(step + 1, steps, loss))
    if steps and not made:
        raise WorkerError(
            f"mixed precision overflowed in all {steps} steps of the round; nothing was trained.",
            action="Start the client with --precision fp32.",
        )
    last_epoch.report(ctx)


class _LastEpoch:
    """Loss and accuracy of the last epoch; read once at the end, so that no GPU waits for it."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._batches: list[tuple[int, tuple[Tensor, ...], Tensor | None]] = []

    def add(self, step: int, batch: Batch) -> None:
        """Take a batch of the last epoch, after its objective."""
        if step >= self._first:
            self._batches.append((len(batch), batch.terms, batch.right))

    def report(self, ctx: Context) -> None:
        """Tell the context, unless the loss is no number."""
        images = sum(n for n, _, _ in self._batches)
        if not images:
            return
        loss = sum(n * sum(t.item() for t in terms) for n, terms, _ in self._batches) / images
        hits = [right for _, _, right in self._batches if right is not None]
        accuracy = sum(int(h.item()) for h in hits) / images if hits else None
        if math.isfinite(loss):
            ctx.trained(TrainingMetrics(loss, accuracy))


def _batches(
    ctx: Context,
    data: ImageSet,
    classes: Sequence[int],
    epochs: int,
    batch_size: int,
    view: Augmentation,
) -> Iterator[MicroBatch]:
    """Yield the views of all batches; all randomness comes from one generator, in order."""
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    sizes = {"epochs": epochs, "batch_size": batch_size}
    for index in shuffled_batches(len(data), **sizes, generator=generator):
        pixels = augment(on_device(data.take(index), ctx.device), view, generator)  # (B, S, S, 3)
        rows = class_positions(data.labels[index], classes)  # (B,)
        yield MicroBatch(index, pixels, on_device(rows, ctx.device))


def _scaler(ctx: Context) -> torch.amp.GradScaler | None:
    if getattr(ctx.backbone, "precision", "fp32") != "fp16":
        return None
    device = ctx.device.partition(":")[0]
    return torch.amp.GradScaler(device, init_scale=FIRST_SCALE, growth_interval=SCALE_GROWS)


def _step(
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    clip_norm: float | None,
) -> bool:
    """Make the optimiser's step and return True; leave one with overflowed gradients out."""
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimiser)
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    if scaler is None:
        optimiser.step()
        return True
    scaler.step(optimiser)
    before = scaler.get_scale()
    scaler.update()
    return scaler.get_scale() >= before


class _Due:
    """Decision to report a loss: always on a CPU; not each time on a GPU, which has to finish."""

    def __init__(self, device: str) -> None:
        self._every_s = LOSS_S if device.startswith("cuda") else 0.0
        self._last = float("-inf")

    def __call__(self, last: bool) -> bool:
        now = time.monotonic()
        if not last and now - self._last < self._every_s:
            return False
        self._last = now
        return True


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
    """Return the number of images of each class: (c,)."""
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
        """Add features (B, d) of images whose classes have the positions ``rows`` (B,)."""
        np.add.at(self.sums, rows, features.astype(np.float64))
        np.add.at(self.counts, rows, 1)

    @property
    def means(self) -> NDArray[np.float64]:
        """The class means, (c, d); zero for a class without images."""
        return class_means(self.sums, self.counts)


def all_features(
    ctx: Context,
    features: Callable[[Tensor], Tensor],
    data: ImageSet,
    *,
    batch_size: int,
) -> NDArray[np.float32]:
    """Return the features (N, d) of all images, unaugmented, without a gradient.

    Args:
        ctx: micro-batch and progress.
        features: images (B, S, S, 3) in [0, 255] -> (B, d).
        data: the images.
        batch_size: images per pass if the context sets no micro-batch.
    """
    chunks = [np.zeros((0, ctx.backbone_info.dim), dtype=np.float32)]
    for index, pixels in plain_batches(data, ctx.micro_batch or batch_size, ctx.device):
        with torch.no_grad():
            chunks.append(to_numpy(features(pixels)))
        ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return np.concatenate(chunks)


def sum_features(
    ctx: Context,
    features: Callable[[Tensor], Tensor],
    data: ImageSet,
    *,
    batch_size: int,
    report: bool,
) -> FeatureSums:
    """Sum the features of all images, unaugmented, by class of the task, without a gradient.

    The sums are clipped and noised as ``ctx.privacy`` says, so each call is one more release.

    Args:
        ctx: micro-batch, task, privacy and progress.
        features: images (B, S, S, 3) in [0, 255] -> (B, d).
        data: the images.
        batch_size: images per pass if the context sets no micro-batch.
        report: True to report to the context's progress.
    """
    running = FeatureSums.zero(len(ctx.task.classes), ctx.backbone_info.dim)
    rows = class_positions(data.labels, ctx.task.classes)  # (N,)
    for index, pixels in plain_batches(data, ctx.micro_batch or batch_size, ctx.device):
        with torch.no_grad():
            batch = features(pixels)
        running.add(ctx.privacy.clipped(to_numpy(batch)), rows[index])
        if report:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return replace(running, sums=ctx.privacy.released_sums(running.sums, running.counts))
