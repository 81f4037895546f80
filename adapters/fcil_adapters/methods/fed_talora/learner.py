"""Fed-TaLoRA's client half: train the shared LoRA and the head's rows on local images (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.local_passes import (
    Batch,
    class_counts,
    optimise,
    schedule_factor,
    sum_features,
)
from fcil_adapters.lora_linear import trained_params
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import HeadRows, Received, read_parts
from fcil_adapters.methods.fed_talora.views import training_view
from fcil_protocol.payload import Array, Payload


class Learner:
    """Stateless: residuals are added up anew from the broadcast's parts, so none is missed."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train LoRA and head; a task of a lone class is answered with its mean feature."""
        h: FedTaloraHparams = ctx.hparams
        received = read_parts(h, broadcast)
        bench = _Bench.of(ctx, received)
        counts = class_counts(data, ctx.task.classes)
        sent: dict[str, Array] = {
            "classes": np.asarray(ctx.task.classes, dtype=np.int64),
            "count": counts,
            "n": counts.sum(dtype=np.int64).reshape(1),
        }
        if not h.single_column(ctx.task):
            _train(ctx, bench, data)
        elif len(data) >= h.min_count_upload:
            sums = sum_features(ctx, bench.features, data, batch_size=h.batch_size, report=True)
            sent["mean"] = sums.means.astype(np.float32)  # (1, d)
        sent |= {f"lora.{name}": to_numpy(p) for name, p in bench.lora.items()}
        sent |= {"head.weight": to_numpy(bench.weight), "head.bias": to_numpy(bench.bias)}
        return state, Payload(sent, {"version": received.version})


@dataclass(frozen=True)
class _Bench:
    """What one round works on.

    Attributes:
        lora: `trained_params` of the view.
        weight, bias: the head's trainable rows: (rows, d) and (rows,).
        barred: past rows of classes that nobody ever had, (rows,); they are no columns.
        frozen: past rows that are columns besides: weight (f, d) and bias (f,).
    """

    h: FedTaloraHparams
    backbone: Backbone
    view: Any
    lora: dict[str, nn.Parameter]
    weight: nn.Parameter
    bias: nn.Parameter
    barred: Tensor
    frozen: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, ctx: Context, received: Received) -> _Bench:
        h: FedTaloraHparams = ctx.hparams
        device = ctx.backbone.device
        *past, rows = received.tasks
        view = training_view(ctx.backbone, h, received)
        own = np.isin(rows.classes, ctx.task.classes)
        frozen = HeadRows.joined((*past, rows.chosen(np.zeros(len(own), dtype=bool))))
        known = frozen.seen & (h.head_loss == "seen_frozen")
        return cls(
            h=h,
            backbone=ctx.backbone,
            view=view,
            lora=trained_params(view, h.blocks),
            weight=nn.Parameter(to_torch(rows.weight, device)),
            bias=nn.Parameter(to_torch(rows.bias, device)),
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


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Run the local epochs."""
    h = bench.h
    factor = schedule_factor(h.schedule, ctx.round, ctx.rounds)
    groups = [
        {"params": [bench.weight, bench.bias], "lr": h.lr_head * factor},
        {"params": list(bench.lora.values()), "lr": h.lr_lora * factor},
    ]
    optimiser = torch.optim.SGD(groups, momentum=h.momentum, weight_decay=h.weight_decay)

    def objective(batch: Batch) -> None:
        _backward(ctx, bench, batch)

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size, view=h.augment
    )


def _backward(ctx: Context, bench: _Bench, batch: Batch) -> None:
    """Add the gradient of one batch's mean cross-entropy."""
    first = len(bench.weight) - len(ctx.task.classes)  # the task's rows are the last
    for piece in batch.pieces():
        with bench.backbone.training():
            features = bench.features(piece.pixels)
        logits = bench.logits(features.float())  # (b, columns)
        loss = functional.cross_entropy(logits, first + piece.rows, reduction="sum")
        batch.backward(loss / len(batch))
