"""HGP's client half: train prompts and head rows, then describe the classes (torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fcil_adapters.contract import Array, Context, ImageSet, Payload, Progress, State
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.methods.hgp.pools import Pools
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.gaussians.reports import report_gaussians
from fcil_adapters.toolkit.prompts.client import PromptSetup
from fcil_adapters.toolkit.prompts.pools import Prompted
from fcil_adapters.toolkit.prompts.prefix import Queries, with_pixels
from fcil_adapters.toolkit.training.optimise import Batch, MicroBatch, optimise
from fcil_adapters.toolkit.training.prefetch import plain_batches


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the task's prompts, keys and head rows; send them with the classes' Gaussians."""
        h: HgpHparams = ctx.hparams
        start = read_parts(broadcast)
        backbone = with_pixels(ctx.backbone, h.pixels)
        pools = Pools.of(h, start.prompts, backbone.device)
        features = Prompted(backbone, h.blocks).features(pools.prompts)
        setup = PromptSetup.of(ctx, backbone, features, pools.tasks.current, start)
        queries = Queries(backbone, data, h.query, ctx.micro_batch or h.batch_size)
        # Noise covers features of the model as it came: trained here, it depends on each image.
        facts = _facts(ctx, setup, queries, data) if ctx.privacy.on else None
        # The cross-entropy of a single column is 0, whatever the prompts: nothing to train,
        # and the server takes the head's row from the class mean.
        if len(ctx.task.classes) > 1:
            _train(ctx, setup, queries, data)
        sent: dict[str, Array] = {name: to_numpy(p) for name, p in setup.trained.items()}
        return state, Payload({**sent, **(facts or _facts(ctx, setup, queries, data))})


def _train(ctx: Context, setup: PromptSetup, queries: Queries, data: ImageSet) -> None:
    """Run the local epochs; Adam starts afresh in each round."""
    h: HgpHparams = ctx.hparams
    groups = [
        {"params": list(setup.prompts.values()), "lr": h.lr_prompt},
        {"params": [setup.weight, setup.bias], "lr": h.lr_head},
    ]

    def objective(batch: Batch) -> None:
        def losses(piece: MicroBatch) -> Tensor:
            logits = setup.logits(setup.prompted(piece, queries.of(piece.index, piece.pixels)))
            batch.scored(logits, piece)
            return functional.cross_entropy(logits, piece.rows, reduction="sum")

        batch.backward_mean(losses)

    def factor(step: int, steps: int) -> float:
        return _schedule(h, step, steps)

    optimise(
        ctx, data, torch.optim.Adam(groups), objective, epochs=h.epochs, batch_size=h.batch_size,
        view=h.augment, factor=factor, clip_norm=h.clip_norm,
    )  # fmt: skip


def _facts(ctx: Context, setup: PromptSetup, queries: Queries, data: ImageSet) -> dict[str, Array]:
    """Return image counts, and Gaussians of the model as it is now on plain images."""
    features = _plain_features(ctx, setup, queries, data)
    return report_gaussians(ctx, ctx.hparams, features, data)


def _plain_features(
    ctx: Context, setup: PromptSetup, queries: Queries, data: ImageSet
) -> NDArray[np.float32]:
    """Return the features (N, d) of all images as they are."""
    size = ctx.micro_batch or ctx.hparams.batch_size
    chunks = [np.zeros((0, setup.weight.shape[1]), dtype=np.float32)]
    for index, pixels in plain_batches(data, size, ctx.device):
        with torch.no_grad():
            chunks.append(to_numpy(setup.features(pixels, queries.of(index, pixels))))
        if len(ctx.task.classes) == 1:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return np.concatenate(chunks)


def _schedule(h: HgpHparams, step: int, steps: int) -> float:
    """Return the factor of both rates at a step (from 0) of a round's local training."""
    return 1.0 if h.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))
