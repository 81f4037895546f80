"""A client's training of LoRA and a linear head, and a method's additions (torch; `manifest`).

A learner of this family makes three calls::

    received = read_parts(ctx.hparams, broadcast)
    bench = Bench.of(ctx, received)
    return state, Payload(train_round(ctx, bench, data))

Further losses and targets are a `Loss` of its own, regularisers a ``penalty``; a method adds
further tensors that it sends to the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Context, ImageSet
from fcil_adapters.contract.exemplars import Joined
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import F32, HeadRows
from fcil_adapters.toolkit.lora.layer import trained_params
from fcil_adapters.toolkit.lora.manifest import LoraBroadcast
from fcil_adapters.toolkit.lora.options import LoraHparams
from fcil_adapters.toolkit.lora.views import merged_view, training_view
from fcil_adapters.toolkit.training.optimise import (
    Batch,
    MicroBatch,
    class_counts,
    optimise,
    schedule_factor,
    sum_features,
)
from fcil_protocol.payloads.payload import Array


@dataclass(frozen=True)
class Pass:
    """Results for the images of a step, or for a piece of them that fits the device.

    Attributes:
        piece: the images, and each one's own column of the logits (`MicroBatch.rows`).
        features: (b, d).
        logits: (b, columns): the trained rows first, in the order of `LoraSetup.classes`, then
            frozen ones; -inf for past classes that no client ever had.
        images: B, of the entire step.
    """

    piece: MicroBatch
    features: Tensor
    logits: Tensor
    images: int


Loss = Callable[[Pass], Tensor]  # the sum over the b images; `train` divides by B


def cross_entropy(seen: Pass) -> Tensor:
    """Return the summed cross-entropy over all columns."""
    return functional.cross_entropy(seen.logits, seen.piece.rows, reduction="sum")


@dataclass(frozen=True)
class LoraSetup:
    """The model and parameters of one round.

    Attributes:
        lora: `trained_params` of the view.
        weight, bias: the head's trainable rows: (rows, d) and (rows,).
        classes: their ids; the task's are the last.
        barred: past rows of classes that no client ever had, (rows,); they are no columns.
        frozen: past rows that are further columns: weight (f, d) and bias (f,).
    """

    h: LoraHparams
    backbone: Backbone
    view: Any
    lora: dict[str, nn.Parameter]
    weight: nn.Parameter
    bias: nn.Parameter
    classes: tuple[int, ...]
    barred: Tensor
    frozen: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, ctx: Context, received: LoraBroadcast, view: Any = None) -> LoraSetup:
        """Prepare a round from a broadcast.

        Args:
            ctx: backbone, options and task.
            received: the broadcast.
            view: of the backbone with the LoRA to train; None: `training_view`.
        """
        h: LoraHparams = ctx.hparams
        device = ctx.backbone.device
        *past, rows = received.tasks
        if view is None:
            view = training_view(ctx.backbone, h, received.lora, round_=ctx.round)
        own = np.isin(rows.classes, ctx.task.classes)
        frozen = HeadRows.joined((*past, rows.chosen(np.zeros(len(own), dtype=bool))))
        known = frozen.seen & h.frozen_columns
        return cls(
            h=h,
            backbone=ctx.backbone,
            view=view,
            lora=trained_params(view, h.blocks),
            weight=nn.Parameter(to_torch(rows.weight, device)),
            bias=nn.Parameter(to_torch(rows.bias, device)),
            classes=tuple(rows.classes.tolist()),
            barred=to_torch(~own & ~rows.seen, device),
            frozen=(
                to_torch(frozen.weight[known], device),
                to_torch(frozen.bias[known], device),
            ),
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features (B, d) of images (B, S, S, 3) in [0, 255]."""
        return cls_features(self.view, self.backbone.normalise(pixels))

    def logits(self, features: Tensor) -> Tensor:
        """Score features (B, d): trained rows first, then frozen ones."""
        trained = functional.linear(features, self.weight, self.bias)
        frozen = functional.linear(features, *self.frozen)
        return torch.cat([trained.masked_fill(self.barred, -torch.inf), frozen], 1)

    def trained(self) -> dict[str, Array]:
        """Return the tensors that the server averages."""
        lora: dict[str, Array] = {f"lora.{name}": to_numpy(p) for name, p in self.lora.items()}
        return {**lora, "head.weight": to_numpy(self.weight), "head.bias": to_numpy(self.bias)}


@dataclass(frozen=True)
class Teacher:
    """The model of the last task's end, without gradients.

    Attributes:
        classes: the C past ids that any client had, in the order of their tasks.
        weight, bias: their rows at that time, (C, d) and (C,).
    """

    backbone: Backbone
    view: Any
    classes: tuple[int, ...]
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, ctx: Context, received: LoraBroadcast) -> Teacher | None:
        """Return the broadcast's teacher; the first task has none."""
        if received.teacher is None:
            return None
        lora, rows = received.teacher
        rows = rows.chosen(rows.seen)
        device = ctx.backbone.device
        return cls(
            backbone=ctx.backbone,
            view=merged_view(ctx.backbone, ctx.hparams, lora),
            classes=tuple(rows.classes.tolist()),
            weight=to_torch(rows.weight, device),
            bias=to_torch(rows.bias, device),
        )

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Return the features (B, d) of images (B, S, S, 3) in [0, 255]."""
        with self.backbone.training():
            features = cls_features(self.view, self.backbone.normalise(pixels))
        return features.float()

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return the scores (B, C) of images."""
        return functional.linear(self.features(pixels), self.weight, self.bias)


def train_round(
    ctx: Context,
    bench: LoraSetup,
    data: ImageSet,
    *,
    loss: Loss = cross_entropy,
    penalty: Callable[[LoraSetup], Tensor] | None = None,
    beside: ImageSet | None = None,
) -> dict[str, Array]:
    """Train on the task's images and return the upload of `manifest.train_exchange`.

    For a task whose loss has one column, the mean feature replaces training. Images ``beside`` are
    of past classes; they are trained on with the others, and not counted.
    """
    counts = class_counts(data, ctx.task.classes)
    sent = tally(ctx.task.classes, counts)
    if not bench.h.single_column(ctx.task):
        images = data if beside is None else Joined(data, beside)
        train(ctx, bench, images, loss=loss, penalty=penalty)
    elif len(data) >= bench.h.min_count_upload:
        sums = sum_features(ctx, bench.features, data, batch_size=bench.h.batch_size, report=True)
        sent["mean"] = sums.means.astype(np.float32)  # (1, d)
    return sent | bench.trained()


def train(
    ctx: Context,
    bench: LoraSetup,
    data: ImageSet,
    *,
    loss: Loss = cross_entropy,
    penalty: Callable[[LoraSetup], Tensor] | None = None,
) -> None:
    """Run the local epochs by SGD; the bench's parameters change.

    Args:
        ctx: seed, round, micro-batch and progress.
        bench: the model and its parameters.
        data: images of `LoraSetup.classes`.
        loss: summed over a pass's images.
        penalty: once per step, independent of the images.
    """
    h = bench.h
    factor = schedule_factor(h.schedule, ctx.round, ctx.rounds)
    groups = [
        {"params": [bench.weight, bench.bias], "lr": h.lr_head * factor},
        {"params": list(bench.lora.values()), "lr": h.lr_lora * factor},
    ]
    optimiser = torch.optim.SGD(groups, momentum=h.momentum, weight_decay=h.weight_decay)

    def objective(batch: Batch) -> None:
        _backward(bench, batch, loss)
        if penalty is not None:
            batch.backward(penalty(bench))

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size,
        view=h.augment, classes=bench.classes,
    )  # fmt: skip


def _backward(bench: LoraSetup, batch: Batch, loss: Loss) -> None:
    """Add the gradient of one batch's mean loss."""

    def losses(piece: MicroBatch) -> Tensor:
        with bench.backbone.training():
            features = bench.features(piece.pixels)
        features = features.float()
        logits = bench.logits(features)
        batch.scored(logits, piece)
        return loss(Pass(piece, features, logits, len(batch)))

    batch.backward_mean(losses)


def lora_tensors(bench: LoraSetup, received: Mapping[str, F32]) -> dict[str, Tensor]:
    """Return a broadcast's values of each trained LoRA tensor, by the names of `LoraSetup.lora`."""
    return {n: to_torch(received[f"lora.{n}"], bench.backbone.device) for n in bench.lora}
