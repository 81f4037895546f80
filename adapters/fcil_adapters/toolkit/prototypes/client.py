"""PILoRA's and PLoRA's clients: train LoRA and prototypes, report, and predict (torch)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Context, ImageSet
from fcil_adapters.numerics.class_reports import report_tensors
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.distances import (
    prototype_distances,
    prototype_losses,
    squared_distances,
)
from fcil_adapters.toolkit.heads.scorer import LinearLayer, Scorer
from fcil_adapters.toolkit.prototypes.options import PrototypeHparams
from fcil_adapters.toolkit.prototypes.rows import PrototypeRows, known
from fcil_adapters.toolkit.training.optimise import (
    Batch,
    FeatureSums,
    MicroBatch,
    class_counts,
    optimise,
    schedule_factor,
    sum_features,
)
from fcil_protocol.payloads.payload import Array, Payload


@dataclass(frozen=True)
class PrototypeSetup:
    """A client's trained tensors, and the terms of its method's objective besides l_dce and l_pl.

    Attributes:
        lora: name -> trainable tensor, such as ``0.q.A``.
        proto: (c, d), the trainable prototypes of the task's classes.
        fixed: (m, d), prototypes that are further columns of the softmax.
        features: images (b, S, S, 3) in [0, 255] -> (b, d).
        losses: the same images -> features and each image's further loss (b,), if any.
        penalty: () -> the terms of a batch that no image enters, if any.
    """

    lora: dict[str, nn.Parameter]
    proto: nn.Parameter
    fixed: Tensor
    features: Callable[[Tensor], Tensor]
    losses: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    penalty: Callable[[], Tensor | None]


def answer(ctx: Context, trainee: PrototypeSetup, data: ImageSet) -> Payload:
    """Answer ``prepare`` with class means and counts, and ``train`` with trained tensors too."""
    h: PrototypeHparams = ctx.hparams
    trained: dict[str, Array] = {}
    seen: FeatureSums | None = None
    # Noise covers means of the broadcast's model: one trained here depends on each image.
    if ctx.privacy.on:
        seen = _sum(ctx, trainee, data)
    if ctx.kind == "train":
        seen = _train(ctx, trainee, data) or seen
        trained = {f"lora.{name}": to_numpy(p) for name, p in trainee.lora.items()}
        trained["proto"] = to_numpy(trainee.proto)
    seen = seen or _sum(ctx, trainee, data)
    counts = class_counts(data, ctx.task.classes)
    facts = report_tensors(ctx.task.classes, seen.means, counts, h.min_count_upload)
    return Payload({**trained, **facts})


def _sum(ctx: Context, trainee: PrototypeSetup, data: ImageSet) -> FeatureSums:
    size = ctx.hparams.batch_size
    report = ctx.kind == "prepare"
    return sum_features(ctx, trainee.features, data, batch_size=size, report=report)


def _train(ctx: Context, trainee: PrototypeSetup, data: ImageSet) -> FeatureSums | None:
    """Run the local epochs; return the sums of the features on the way if the options use them."""
    h: PrototypeHparams = ctx.hparams
    factor = schedule_factor(h.schedule, ctx.round, ctx.rounds)
    groups = [
        {"params": [trainee.proto], "lr": h.lr_prototype * factor},
        {"params": list(trainee.lora.values()), "lr": h.lr_lora * factor},
    ]
    optimiser = torch.optim.Adam(groups, weight_decay=h.weight_decay)
    wanted = h.mean_from == "training" and not ctx.privacy.on
    seen = FeatureSums.zero(*trainee.proto.shape) if wanted else None

    def objective(batch: Batch) -> None:
        _backward(ctx, trainee, batch, seen)

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size, view=h.augment
    )
    return seen


def _backward(
    ctx: Context, trainee: PrototypeSetup, batch: Batch, seen: FeatureSums | None
) -> None:
    """Add the gradient of one batch's objective, and its features to the sums, if any.

    ``mean(l_dce + lambda l_pl + further losses) + penalty``
    """
    h: PrototypeHparams = ctx.hparams
    # Means that leave the client are of float32 features.
    precise = contextlib.nullcontext() if seen is not None else ctx.backbone.training()

    def losses(piece: MicroBatch) -> Tensor:  # (b,)
        with precise:
            features, further = trainee.losses(piece.pixels)  # (b, d), (b,)
        features = features.float()
        prototypes = torch.cat([trainee.proto, trainee.fixed])  # (c + m, d)
        distances = prototype_distances(features, prototypes, h.dce)  # (b, c + m)
        batch.scored(-distances, piece)
        dce, pull = prototype_losses(distances, piece.rows, h.delta)
        if seen is not None:
            seen.add(to_numpy(features), piece.rows.cpu().numpy())
        shared = dce + h.lambda_pl * pull
        return shared if further is None else shared + further

    batch.backward_mean(losses)
    penalty = trainee.penalty()
    if penalty is not None:
        batch.backward(penalty)


def nearest_prototype(
    backbone: Backbone, view: Any, tasks: Iterable[PrototypeRows], micro_batch: int | None
) -> Scorer:
    """Return the classifier by the nearest prototype; a score is a negative squared distance.

    Args:
        backbone: normalises images.
        view: gives their features.
        tasks: prototypes of all tasks; classes that no client ever had are no candidates.
        micro_batch: images per forward pass.
    """
    classes, rows = known(tasks, backbone.info.dim)
    prototypes = to_torch(rows, backbone.device)  # (C, d)

    def features(pixels: Tensor) -> Tensor:
        return cls_features(view, backbone.normalise(pixels))  # (b, d)

    def score(pixels: Tensor) -> Tensor:
        return -squared_distances(features(pixels), prototypes)

    return Scorer(classes, score, micro_batch, features, LinearLayer.nearest(prototypes))
