"""PILoRA's client half: train the task's LoRA and prototypes on local images (torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from fcil_adapters.augment import augment
from fcil_adapters.backbone import Backbone, cls_features
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, Progress, State
from fcil_adapters.heads import prototype_distances, prototype_losses
from fcil_adapters.lora import PROJECTIONS, adapter_params
from fcil_adapters.methods.pilora.composition import training_view
from fcil_adapters.methods.pilora.losses import l1_norm, orthogonality
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.methods.pilora.parts import TaskPart, read_parts, statistics_payload
from fcil_adapters.statistics import class_means, class_positions, class_sums
from fcil_protocol.payload import Array, Payload

_BATCHES = 1  # purpose of the random stream that orders and augments images


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Answer ``prepare`` with class means, and ``train`` with LoRA and prototypes too."""
        bench = _Bench.of(ctx, read_parts(broadcast))
        trained: dict[str, Array] = {}
        running: _Sums | None = None
        if ctx.kind == "train":
            running = _train(ctx, bench, data)
            trained = {f"lora.{name}": to_numpy(p) for name, p in bench.lora.items()}
            trained["proto"] = to_numpy(bench.proto)
        if running is None or bench.h.mean_from == "eval":
            running = _class_sums(ctx, bench, data)
        counts = _counts(data, ctx.task.classes)
        means = class_means(running.sums, running.counts)  # (c, d)
        facts = statistics_payload(ctx.task.classes, means, counts, bench.h.min_count_upload)
        return state, Payload({**trained, **facts})


@dataclass(frozen=True)
class _Sums:
    sums: NDArray[np.float64]  # (c, d)
    counts: NDArray[np.int64]  # (c,)

    def plus(self, features: Tensor, labels: NDArray[np.int64], classes: tuple[int, ...]) -> _Sums:
        sums, counts = class_sums(to_numpy(features), labels, classes)
        return _Sums(self.sums + sums, self.counts + counts)


@dataclass(frozen=True)
class _Bench:
    """What one round works on: a view with the trainable LoRA, prototypes, fixed columns."""

    h: PiloraHparams
    backbone: Backbone
    view: Any
    lora: dict[str, nn.Parameter]  # `adapter_params` of the view
    proto: nn.Parameter  # (c, d)
    fixed: Tensor  # (m, d): prototypes of past classes, and of those still to come
    past_a: dict[str, Tensor]  # <block>.<projection> -> (t r, d); empty at t = 0

    @classmethod
    def of(cls, ctx: Context, tasks: tuple[TaskPart, ...]) -> _Bench:
        h: PiloraHparams = ctx.hparams
        *past, current = tasks
        view = training_view(ctx.backbone, h, tasks)
        fixed = np.concatenate([*(task.known[1] for task in past), current.future])
        stacks = {
            f"{b}.{p}": np.concatenate([task.lora[f"lora.{b}.{p}.A"] for task in past])
            for b in h.blocks
            for p in PROJECTIONS
            if past
        }
        device = ctx.backbone.device
        return cls(
            h=h,
            backbone=ctx.backbone,
            view=view,
            lora=adapter_params(view, h.blocks),
            proto=nn.Parameter(to_torch(current.proto, device)),
            fixed=to_torch(fixed, device),
            past_a={name: to_torch(stack, device) for name, stack in stacks.items()},
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features (B, d) of images (B, S, S, 3) in [0, 255]."""
        return cls_features(self.view, self.backbone.normalise(pixels))

    def current_a(self) -> dict[str, Tensor]:
        return {n.removesuffix(".A"): A for n, A in self.lora.items() if n.endswith(".A")}


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> _Sums:
    """Run the local epochs; return the sums of the features seen on the way."""
    h = bench.h
    factor = _schedule(h, ctx.round, ctx.rounds)
    groups = [
        {"params": [bench.proto], "lr": h.lr_prototype * factor},
        {"params": list(bench.lora.values()), "lr": h.lr_lora * factor},
    ]
    optimiser = torch.optim.Adam(groups, weight_decay=h.weight_decay)
    generator = Generator().manual_seed(ctx.torch_seed(_BATCHES))
    running = _no_sums(ctx, bench)
    steps = h.epochs * math.ceil(len(data) / h.batch_size)
    for step, index in enumerate(_batches(len(data), h, generator)):
        optimiser.zero_grad()
        loss, features = _backward(ctx, bench, data, index, generator)
        optimiser.step()
        running = running.plus(features, data.labels[index], ctx.task.classes)
        ctx.progress(Progress(step + 1, steps, loss))
    return running


def _backward(
    ctx: Context, bench: _Bench, data: ImageSet, index: NDArray[np.int64], generator: Generator
) -> tuple[float, Tensor]:
    """Add the gradient of one batch's objective (Eq. 15); return its value and features (B, d).

    The batch may pass in several micro-batches; the views are drawn for the whole batch
    first, and every image counts 1 / B, so the gradient is the same.
    """
    h = bench.h
    pixels = augment(to_torch(data.take(index)), h.augment, generator)  # (B, S, S, 3)
    target = to_torch(class_positions(data.labels[index], ctx.task.classes))  # (B,)
    total = 0.0
    seen = []
    micro = ctx.micro_batch or len(index)
    for part, columns in zip(torch.split(pixels, micro), torch.split(target, micro), strict=True):
        features = bench.features(part)  # (b, d)
        prototypes = torch.cat([bench.proto, bench.fixed])  # (c + m, d)
        distances = prototype_distances(features, prototypes, h.dce)  # (b, c + m)
        dce, pull = prototype_losses(distances, columns.to(distances.device), h.delta)
        loss = (dce + h.lambda_pl * pull).sum() / len(index)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        seen.append(features.detach())
    return total + _penalise(bench), torch.cat(seen)


def _penalise(bench: _Bench) -> float:
    """Add the gradient of the terms that no image enters, once per batch; return their value."""
    h, current = bench.h, bench.current_a()
    terms = []
    if bench.past_a and h.gamma_ort > 0:
        terms.append(h.gamma_ort * orthogonality(bench.past_a, current))
    if h.l1 > 0:
        terms.append(h.l1 * l1_norm(current))
    if not terms:
        return 0.0
    loss = torch.stack(terms).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _class_sums(ctx: Context, bench: _Bench, data: ImageSet) -> _Sums:
    """Sum the features of all images as they are, by class, without changing anything."""
    running = _no_sums(ctx, bench)
    size = ctx.micro_batch or bench.h.batch_size
    for start in range(0, len(data), size):
        index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
        with torch.no_grad():
            features = bench.features(to_torch(data.take(index)))
        running = running.plus(features, data.labels[index], ctx.task.classes)
        if ctx.kind == "prepare":
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return running


def _schedule(h: PiloraHparams, round_: int, rounds: int) -> float:
    """Return the factor of both steps in a round (from 0) of a task's ``rounds``."""
    if h.schedule == "constant":
        return 1.0
    e = max(round_ - 1, 0) if h.schedule == "cosine_repeat" else round_
    return 0.5 * (1 + math.cos(math.pi * e / rounds))


def _batches(count: int, h: PiloraHparams, generator: Generator) -> Iterator[NDArray[np.int64]]:
    for _ in range(h.epochs):
        order = torch.randperm(count, generator=generator).numpy()
        for start in range(0, count, h.batch_size):
            yield order[start : start + h.batch_size]


def _counts(data: ImageSet, classes: tuple[int, ...]) -> NDArray[np.int64]:
    rows = class_positions(data.labels, classes)
    return np.bincount(rows, minlength=len(classes)).astype(np.int64)


def _no_sums(ctx: Context, bench: _Bench) -> _Sums:
    c, d = len(ctx.task.classes), bench.proto.shape[1]
    return _Sums(np.zeros((c, d)), np.zeros(c, dtype=np.int64))
