"""HePCo's client half: train prompt pools, keys and the task's head rows (torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.local_passes import Batch, class_counts, optimise, sum_features
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.parts import HEAD, GlobalModel, read_parts, upload
from fcil_adapters.methods.hepco.prompting import PromptedModel
from fcil_adapters.prompts import Queries, query_features
from fcil_protocol.payload import Array, Payload


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train on local images; in a task of a single class send its mean feature as head row.

        With one class the softmax has one column and no gradient; prompts and keys then go
        back as they came, and the server makes a head row of the clients' means.
        """
        bench = _Bench.of(ctx, read_parts(broadcast))
        if len(ctx.task.classes) > 1:
            _train(ctx, bench, data)
        else:
            _set_mean_row(ctx, bench, data)
        trained: dict[str, Array] = {name: to_numpy(p) for name, p in bench.trained.items()}
        counts = class_counts(data, ctx.task.classes)
        sent = upload(trained, ctx.task.classes, counts, send_counts=bench.h.send_counts)
        return state, sent


@dataclass(frozen=True)
class _Bench:
    """What one round works on.

    Attributes:
        pools: prompts and keys of all blocks.
        weight, bias: the task's head rows, (c, d) and (c,).
    """

    h: HepcoHparams
    model: PromptedModel
    pools: dict[str, nn.Parameter]
    weight: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def of(cls, ctx: Context, start: GlobalModel) -> _Bench:
        device = ctx.backbone.device
        first = len(start.classes) - start.current  # the task's rows are the last
        return cls(
            h=ctx.hparams,
            model=PromptedModel(ctx.backbone, ctx.hparams),
            pools={n: nn.Parameter(to_torch(array, device)) for n, array in start.pools.items()},
            weight=nn.Parameter(to_torch(start.weight[first:], device)),
            bias=nn.Parameter(to_torch(start.bias[first:], device)),
        )

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Everything that is trained and sent, by name."""
        return {**self.pools, HEAD[0]: self.weight, HEAD[1]: self.bias}


def _train(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Run the local epochs; Adam starts anew in each round."""
    h = bench.h
    queries = Queries(bench.model.backbone, data, h.query, ctx.micro_batch or h.batch_size)
    optimiser = torch.optim.Adam(bench.trained.values(), lr=h.lr)

    def objective(batch: Batch) -> None:
        _backward(bench, batch, queries)

    def factor(step: int, steps: int) -> float:
        return schedule_factor(h, step * h.epochs // steps)

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size,
        view=h.augment, factor=factor,
    )  # fmt: skip


def schedule_factor(h: HepcoHparams, epoch: int) -> float:
    """Return the factor of Adam's step in an epoch: cos(99 pi e / (200 (E - 1)))."""
    if h.schedule == "constant" or h.epochs == 1:
        return 1.0
    return math.cos(99 * math.pi * epoch / (200 * (h.epochs - 1)))


def _backward(bench: _Bench, batch: Batch, queries: Queries) -> None:
    """Add the gradient of one batch's mean cross-entropy over the task's classes."""
    for piece in batch.pieces():
        chosen = queries.of(piece.index, piece.pixels)  # (b, d)
        with bench.model.backbone.training():
            features = bench.model.features(piece.pixels, chosen, bench.pools)  # (b, d)
        logits = functional.linear(features.float(), bench.weight, bench.bias)  # (b, c)
        own = functional.one_hot(piece.rows, logits.shape[1])
        # A product instead of gather: gather's gradient is not deterministic on GPUs.
        batch.backward(-(logits.log_softmax(1) * own).sum() / len(batch))


def _set_mean_row(ctx: Context, bench: _Bench, data: ImageSet) -> None:
    """Make the only head row the mean prompted feature of the images, with bias 0."""

    def features(pixels: Tensor) -> Tensor:
        queries = query_features(bench.model.backbone, pixels)
        return bench.model.features(pixels, queries, bench.pools)

    sums = sum_features(ctx, features, data, batch_size=bench.h.batch_size, report=True)
    with torch.no_grad():
        bench.weight.copy_(to_torch(sums.means))
        bench.bias.zero_()
