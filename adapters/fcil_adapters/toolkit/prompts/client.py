"""A client's training of prompts and of the current task's head rows (torch).

Methods differ in how prompts enter the transformer (`PromptSetup.features`) and in the terms added
to the cross-entropy (``objective``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, ImageSet
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.heads.scorer import Head, Scorer
from fcil_adapters.toolkit.prompts.options import ComponentHparams, PoolHparams, PromptHparams
from fcil_adapters.toolkit.prompts.parts import PromptModel
from fcil_adapters.toolkit.prompts.pools import (
    Prompted,
    TaskPrompts,
    from_components,
    from_pools,
    orthogonality,
)
from fcil_adapters.toolkit.prompts.prefix import Queries, query_features, with_pixels
from fcil_adapters.toolkit.training.optimise import Batch, MicroBatch, optimise, sum_features
from fcil_protocol.payloads.payload import Array

# Images (b, S, S, 3) in [0, 255] and queries (b, d), which choose the prompts -> (b, d).
Features = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PromptSetup:
    """The model and parameters of one round.

    Attributes:
        backbone: computes the queries and prepares the pixels (``pixels``).
        features: the prompted features; gradients flow to the prompts.
        prompts: the trained tensors besides the head's rows, by name.
        weight, bias: the task's head rows, (c, d) and (c,).
    """

    backbone: Backbone
    features: Features
    prompts: Mapping[str, nn.Parameter]
    weight: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def of(
        cls,
        ctx: Context,
        backbone: Backbone,
        features: Features,
        prompts: Mapping[str, nn.Parameter],
        start: PromptModel,
    ) -> PromptSetup:
        """Prepare a round; the trained head rows are those of the task's classes."""
        rows = class_positions(np.asarray(ctx.task.classes), start.head.classes.tolist())
        weight, bias = (
            nn.Parameter(to_torch(array[rows], backbone.device))
            for array in (start.head.weight, start.head.bias)
        )
        return cls(backbone, features, prompts, weight, bias)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All tensors that are trained and sent, by name."""
        return {**self.prompts, HEAD[0]: self.weight, HEAD[1]: self.bias}

    def prompted(self, piece: MicroBatch, queries: Tensor) -> Tensor:
        """Return the features (b, d) of a step's images, in float32."""
        with self.backbone.training():
            features = self.features(piece.pixels, queries)
        return features.float()

    def logits(self, features: Tensor) -> Tensor:
        """Return the scores (b, c) of the task's classes."""
        return functional.linear(features, self.weight, self.bias)


# Adds the gradient of one batch's objective.
Objective = Callable[[PromptSetup, Batch, Queries], None]


def own_cross_entropy(logits: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over images (b, c) of the cross-entropy over the task's classes."""
    own = functional.one_hot(rows, logits.shape[1])
    # A product instead of gather: gather's gradient is not deterministic on GPUs.
    return -(logits.log_softmax(1) * own).sum()


def plain_objective(bench: PromptSetup, batch: Batch, queries: Queries) -> None:
    """Add the gradient of the mean cross-entropy."""

    def losses(piece: MicroBatch) -> Tensor:
        features = bench.prompted(piece, queries.of(piece.index, piece.pixels))
        logits = bench.logits(features)
        batch.scored(logits, piece)
        return own_cross_entropy(logits, piece.rows)

    batch.backward_mean(losses)


def learn(
    ctx: Context, bench: PromptSetup, data: ImageSet, objective: Objective = plain_objective
) -> dict[str, Array]:
    """Train on local images; in a task of a single class send its mean feature as head row.

    With one class the softmax has one column and no gradient; prompts and keys then go back
    unchanged, and the server makes a head row of the clients' means.

    Returns:
        The trained tensors, by name.
    """
    if len(ctx.task.classes) > 1:
        _train(ctx, bench, data, objective)
    else:
        _set_mean_row(ctx, bench, data)
    return {name: to_numpy(p) for name, p in bench.trained.items()}


def _train(ctx: Context, bench: PromptSetup, data: ImageSet, objective: Objective) -> None:
    """Run the local epochs; Adam starts afresh in each round."""
    h: PromptHparams = ctx.hparams
    queries = Queries(bench.backbone, data, h.query, ctx.micro_batch or h.batch_size)
    optimiser = torch.optim.Adam(bench.trained.values(), lr=h.lr)

    def factor(step: int, steps: int) -> float:
        return schedule_factor(h, step * h.epochs // steps)

    optimise(
        ctx, data, optimiser, lambda batch: objective(bench, batch, queries), epochs=h.epochs,
        batch_size=h.batch_size, view=h.augment, factor=factor,
    )  # fmt: skip


def schedule_factor(h: PromptHparams, epoch: int) -> float:
    """Return the factor of Adam's step in an epoch: cos(99 pi e / (200 (E - 1)))."""
    if h.schedule == "constant" or h.epochs == 1:
        return 1.0
    if h.schedule == "cosine_repeat":
        epoch = max(epoch - 1, 0)
    return math.cos(99 * math.pi * epoch / (200 * (h.epochs - 1)))


def _set_mean_row(ctx: Context, bench: PromptSetup, data: ImageSet) -> None:
    """Make the only head row the mean prompted feature of the images, with bias 0."""

    def features(pixels: Tensor) -> Tensor:
        return bench.features(pixels, query_features(bench.backbone, pixels))

    sums = sum_features(ctx, features, data, batch_size=ctx.hparams.batch_size, report=True)
    with torch.no_grad():
        bench.weight.copy_(to_torch(sums.means))
        bench.bias.zero_()


def learn_pools(
    ctx: Context,
    h: PoolHparams,
    start: PromptModel,
    data: ImageSet,
    objective: Objective = plain_objective,
) -> dict[str, Array]:
    """Train one pool of prompts per block, and the task's head rows (HePCo, section 5.1)."""
    backbone = with_pixels(ctx.backbone, h.pixels)
    (first,) = start.prompts
    pools = {n: nn.Parameter(to_torch(array, backbone.device)) for n, array in first.items()}
    features = Prompted(backbone, h.blocks).features(from_pools(pools, h.blocks))
    return learn(ctx, PromptSetup.of(ctx, backbone, features, pools, start), data, objective)


def pool_scorer(ctx: Context, h: PoolHparams, model: PromptModel, backbone: Backbone) -> Scorer:
    """Return the classifier of one pool of prompts per block."""
    backbone = with_pixels(backbone, h.pixels)
    (last,) = model.prompts
    pools = {n: to_torch(array, backbone.device) for n, array in last.items()}
    features = Prompted(backbone, h.blocks).features(from_pools(pools, h.blocks))
    return scorer(ctx, backbone, features, Head.linear(model.head, backbone.device))


def component_bench(
    ctx: Context, h: ComponentHparams, start: PromptModel
) -> tuple[PromptSetup, TaskPrompts]:
    """Return the bench that trains the last task's components, and the components of all tasks."""
    backbone = with_pixels(ctx.backbone, h.pixels)
    tasks = TaskPrompts.of(start.prompts, backbone.device)
    features = component_features(backbone, h, lambda: tasks.whole)
    return PromptSetup.of(ctx, backbone, features, tasks.current, start), tasks


def with_orthogonality(
    h: ComponentHparams, tasks: TaskPrompts, plain: Objective = plain_objective
) -> Objective:
    """Return an objective with the penalty on components of all tasks (CODA-Prompt, Eq. 7)."""
    if h.orthogonality == 0:
        return plain

    def objective(bench: PromptSetup, batch: Batch, queries: Queries) -> None:
        plain(bench, batch, queries)
        batch.backward(h.orthogonality * orthogonality(tasks.whole))

    return objective


def component_scorer(
    ctx: Context, h: ComponentHparams, model: PromptModel, backbone: Backbone
) -> Scorer:
    """Return the classifier with the components of all tasks."""
    backbone = with_pixels(backbone, h.pixels)
    whole = TaskPrompts.of(model.prompts, backbone.device).whole
    features = component_features(backbone, h, lambda: whole)
    return scorer(ctx, backbone, features, Head.linear(model.head, backbone.device))


def component_features(
    backbone: Backbone, h: ComponentHparams, tensors: Callable[[], Mapping[str, Tensor]]
) -> Features:
    """Return the features with components, which are read again in each pass."""
    return Prompted(backbone, h.blocks).features(from_components(tensors, h.blocks))


def scorer(ctx: Context, backbone: Backbone, features: Features, head: Head) -> Scorer:
    """Return the classifier that puts a head on prompted features."""

    def score(pixels: Tensor) -> Tensor:
        return head.score(features(pixels, query_features(backbone, pixels)))

    return Scorer(head.classes, score, ctx.micro_batch)
