"""PLoRA's client half: train the shared LoRA and the task's prototypes on local images (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from fcil_adapters.augment import augment
from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.class_reports import report_tensors
from fcil_adapters.contract import Context, ImageSet, Progress, State
from fcil_adapters.heads import prototype_distances, prototype_losses
from fcil_adapters.local_passes import (
    FeatureSums,
    class_counts,
    cosine_factor,
    shuffled_batches,
    step_count,
    sum_features,
)
from fcil_adapters.lora import adapter_params
from fcil_adapters.methods.plora.options import PloraHparams
from fcil_adapters.methods.plora.parts import Received, read_parts
from fcil_adapters.methods.plora.views import Student, Teacher, training_view
from fcil_adapters.statistics import class_positions
from fcil_protocol.payload import Array, Payload

_BATCHES = 1  # purpose of the random stream that orders and augments images


class Learner:
    """Stateless: all that a round starts from, the teacher too, is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Answer ``prepare`` with class means, and ``train`` with LoRA and prototypes too."""
        h: PloraHparams = ctx.hparams
        teaches = ctx.kind == "train" and h.gamma_kd > 0
        bench = _Bench.of(ctx, read_parts(broadcast, with_teacher=teaches))
        trained: dict[str, Array] = {}
        running: FeatureSums | None = None
        if ctx.kind == "train":
            running = _train(ctx, bench, data)
            trained = {f"lora.{name}": to_numpy(p) for name, p in bench.lora.items()}
            trained["proto"] = to_numpy(bench.proto)
        if running is None or h.mean_from == "eval":
            running = sum_features(
                ctx,
                bench.features,
                data,
                batch_size=h.batch_size,
                report=ctx.kind == "prepare",
            )
        counts = class_counts(data, ctx.task.classes)
        facts = report_tensors(ctx.task.classes, running.means, counts, h.min_count_upload)
        return state, Payload({**trained, **facts})


@dataclass(frozen=True)
class _Bench:
    """What one round works on."""

    h: PloraHparams
    backbone: Backbone
    student: Student
    teacher: Teacher | None
    lora: dict[str, nn.Parameter]  # `adapter_params` of the student's view
    proto: nn.Parameter  # (c, d)
    past: Tensor  # (m, d): prototypes of past classes

    @classmethod
    def of(cls, ctx: Context, received: Received) -> _Bench:
        h: PloraHparams = ctx.hparams
        backbone: Backbone = ctx.backbone
        view = training_view(backbone, h, received.lora)
        teacher = received.teacher
        current = received.current.proto
        past = np.concatenate([current[:0], *(task.known[1] for task in received.past)])
        return cls(
            h=h,
            backbone=backbone,
            student=Student(view, h),
            teacher=None if teacher is None else Teacher(backbone, h, teacher),
            lora=adapter_params(view, h.blocks),
            proto=nn.Parameter(to_torch(current, backbone.device)),
            past=to_torch(past, backbone.device),
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features (B, d) of images (B, S, S, 3) in [0, 255]."""
        return self.student.features(self.backbone.normalise(pixels))[0]


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> FeatureSums:
    """Run the local epochs; return the sums of the features seen on the way."""
    h = bench.h
    factor = cosine_factor(ctx.round, ctx.rounds) if h.schedule == "cosine" else 1.0
    groups = [
        {"params": [bench.proto], "lr": h.lr_prototype * factor},
        {"params": list(bench.lora.values()), "lr": h.lr_lora * factor},
    ]
    optimiser = torch.optim.Adam(groups, weight_decay=h.weight_decay)
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    running = FeatureSums.zero(*bench.proto.shape)
    sizes = {"epochs": h.epochs, "batch_size": h.batch_size}
    steps = step_count(len(data), **sizes)
    for step, index in enumerate(shuffled_batches(len(data), **sizes, generator=generator)):
        optimiser.zero_grad()
        loss, features = _backward(ctx, bench, data, index, generator)
        optimiser.step()
        running = running.plus(features, data.labels[index], ctx.task.classes)
        ctx.progress(Progress(step + 1, steps, loss))
    return running


def _backward(
    ctx: Context, bench: _Bench, data: ImageSet, index: NDArray[np.int64], generator: Generator
) -> tuple[float, Tensor]:
    """Add the gradient of one batch's ``l_dce + lambda l_pl + gamma l_kd``.

    The batch may pass in several micro-batches; the views are drawn for the whole batch
    first, and every image counts 1 / B, so the gradient is the same.

    Returns:
        The objective's value and the features (B, d).
    """
    h = bench.h
    pixels = augment(to_torch(data.take(index)), h.augment, generator)  # (B, S, S, 3)
    target = to_torch(class_positions(data.labels[index], ctx.task.classes))  # (B,)
    total = 0.0
    seen = []
    micro = ctx.micro_batch or len(index)
    for part, columns in zip(torch.split(pixels, micro), torch.split(target, micro), strict=True):
        x = bench.backbone.normalise(part)
        features, tapped = bench.student.features(x)  # (b, d) each
        distances = prototype_distances(features, torch.cat([bench.proto, bench.past]), h.dce)
        dce, pull = prototype_losses(distances, columns.to(distances.device), h.delta)
        loss = (dce + h.lambda_pl * pull + _distil(bench, x, tapped)).sum() / len(index)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        seen.append(features.detach())
    return total, torch.cat(seen)


def _distil(bench: _Bench, x: Tensor, tapped: Tensor) -> Tensor:
    """Return gamma l_kd of each image (b,): its distance from where the teacher puts it."""
    if bench.teacher is None:
        return torch.zeros(len(x), device=x.device)
    with torch.no_grad():
        target = bench.teacher.features(x)  # (b, d)
    squares = (tapped - target).square()
    reduced = squares.sum(1) if bench.h.kd_reduction == "sum_d" else squares.mean(1)
    return bench.h.gamma_kd * reduced
