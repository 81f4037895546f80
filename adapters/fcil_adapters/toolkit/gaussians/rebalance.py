"""Retrain a linear head on sampled features, all classes at once (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.nn import functional

from fcil_adapters.contract import Context, Progress
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.gaussians.mixture import Mixture

_TEMPERATURE = 0.1  # of the logit normalisation, as in CCVR's code
_SMALLEST_NORM = 1e-12

F32 = NDArray[np.float32]
Samples = tuple[Tensor, Tensor]  # features (N, d), columns (N,)


class Fitting(Protocol):
    """The options of a method for fitting a head."""

    @property
    def head_loss(self) -> Literal["ce", "ce_logit_norm"]:
        """Cross-entropy of the logits, or of the logits over their scaled norm."""
        ...

    @property
    def resample(self) -> Literal["epoch", "round"]:
        """Interval between draws of samples."""
        ...

    @property
    def server_epochs(self) -> int:
        """Passes over the samples."""
        ...

    @property
    def server_batch(self) -> int:
        """Samples per step."""
        ...

    @property
    def server_lr(self) -> float:
        """The first step."""
        ...

    @property
    def server_momentum(self) -> float:
        """SGD's momentum."""
        ...


class Sampling(Fitting, Protocol):
    """The options of a method for drawing features, in addition."""

    @property
    def samples_per_class(self) -> int:
        """Samples per class on average, in each epoch."""
        ...

    @property
    def sampling_scale(self) -> float:
        """The factor s of the covariances."""
        ...


def fit_to_mixture(
    ctx: Context, h: Sampling, mixture: Mixture, start: tuple[F32, F32], purposes: tuple[int, int]
) -> tuple[F32, F32]:
    """Fit the rows of a mixture's classes to features drawn from it.

    Args:
        ctx: seed, device and progress.
        h: the method's options.
        mixture: of C classes.
        start: weight (C, d) and bias (C,) in the order of its classes.
        purposes: of the random streams that draw features, and that order them.

    Returns:
        Weight and bias, fitted.
    """
    total = h.samples_per_class * len(mixture.classes)
    samples, order = purposes

    def draw(epoch: int) -> Samples:
        draws = Generator().manual_seed(ctx.torch_seed(samples, epoch))
        rng = ctx.rng(samples, epoch)
        return mixture.draw(total, h.sampling_scale, rng, draws, ctx.device)

    weight, bias = rebalance(
        h,
        to_torch(start[0], ctx.device),
        to_torch(start[1], ctx.device),
        draw,
        Generator().manual_seed(ctx.torch_seed(order)),
        lambda done, loss: ctx.progress(Progress(done, h.server_epochs, loss)),
    )
    return to_numpy(weight), to_numpy(bias)


def rebalance(
    h: Fitting,
    weight: Tensor,
    bias: Tensor,
    draw: Callable[[int], Samples],
    generator: Generator,
    report: Callable[[int, float], None],
) -> tuple[Tensor, Tensor]:
    """Fit the rows of a head to samples by SGD with momentum, cosine steps over the epochs.

    Args:
        h: epochs, batch, step, momentum, loss, and interval between draws.
        weight: (C, d), one row per column of the samples; not modified.
        bias: (C,); not modified.
        draw: epoch -> samples on the device of the weight.
        generator: orders the samples.
        report: called with (epochs done, last loss).
    """
    device = weight.device
    rows, offsets = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    optimiser = torch.optim.SGD([rows, offsets], lr=h.server_lr, momentum=h.server_momentum)
    samples: Samples | None = None
    for epoch in range(h.server_epochs):
        optimiser.param_groups[0]["lr"] = _step_size(h, epoch)
        if samples is None or h.resample == "epoch":
            samples = draw(epoch)
        loss = torch.zeros(())
        for index in _batches(len(samples[0]), h.server_batch, generator):
            batch = index.to(device)
            optimiser.zero_grad()
            logits = functional.linear(samples[0][batch], rows, offsets)  # (B, C)
            loss = head_loss(h, logits, samples[1][batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        report(epoch + 1, loss.item())
    return rows.detach(), offsets.detach()


def head_loss(h: Fitting, logits: Tensor, columns: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, C) against columns (B,)."""
    if h.head_loss == "ce_logit_norm":
        norms = logits.norm(dim=1, keepdim=True).clamp_min(_SMALLEST_NORM)
        logits = logits / (norms * _TEMPERATURE)
    return functional.cross_entropy(logits, columns)


def _step_size(h: Fitting, epoch: int) -> float:
    return h.server_lr * 0.5 * (1 + math.cos(math.pi * epoch / h.server_epochs))


def _batches(count: int, size: int, generator: Generator) -> Iterator[Tensor]:
    yield from torch.split(torch.randperm(count, generator=generator), size)
