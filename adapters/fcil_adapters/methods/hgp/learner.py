"""HGP's client half: train prompts and head rows, then describe the classes (torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fcil_adapters.contract import Array, Context, ImageSet, Payload, Progress, State
from fcil_adapters.methods.hgp.local_model import LocalModel
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import read_parts
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.gaussians.reports import report_gaussians
from fcil_adapters.toolkit.training.optimise import Batch, optimise
from fcil_adapters.toolkit.training.prefetch import plain_batches


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the task's prompts, keys and head rows; send them with the classes' Gaussians."""
        model = LocalModel.of(ctx, read_parts(broadcast), data)
        # Noise covers features of the model as it came: trained here, it depends on each image.
        facts = _facts(ctx, model, data) if ctx.privacy.on else None
        # The cross-entropy of a single column is 0, whatever the prompts: nothing to train,
        # and the server takes the head's row from the class mean.
        if len(ctx.task.classes) > 1:
            _train(ctx, model, data)
        return state, Payload({**model.trained(), **(facts or _facts(ctx, model, data))})


def _train(ctx: Context, model: LocalModel, data: ImageSet) -> None:
    """Run the local epochs; Adam starts afresh in each round."""
    h = model.h
    rates = (h.lr_prompt, h.lr_head)
    optimiser = torch.optim.Adam(
        [{"params": some, "lr": lr} for some, lr in zip(model.parameters, rates, strict=True)]
    )

    def objective(batch: Batch) -> None:
        _backward(model, batch)

    def factor(step: int, steps: int) -> float:
        return _schedule(h, step, steps)

    optimise(
        ctx, data, optimiser, objective, epochs=h.epochs, batch_size=h.batch_size,
        view=h.augment, factor=factor, clip_norm=h.clip_norm,
    )  # fmt: skip


def _backward(model: LocalModel, batch: Batch) -> None:
    """Add the gradient of one batch's mean cross-entropy over the task's classes."""
    for piece in batch.pieces():
        queries = model.queries.of(piece.index, piece.pixels)  # (b, d)
        with model.backbone.training():
            features = model.prompted(queries, piece.pixels)
        logits = functional.linear(features.float(), model.weight, model.bias)  # (b, c)
        loss = functional.cross_entropy(logits, piece.rows, reduction="sum")
        batch.backward(loss / len(batch))


def _facts(ctx: Context, model: LocalModel, data: ImageSet) -> dict[str, Array]:
    """Return image counts, and Gaussians of the model as it is now on plain images."""
    return report_gaussians(ctx, model.h, _plain_features(ctx, model, data), data)


def _plain_features(ctx: Context, model: LocalModel, data: ImageSet) -> NDArray[np.float32]:
    """Return the features (N, d) of all images as they are."""
    size = ctx.micro_batch or model.h.batch_size
    chunks = [np.zeros((0, model.weight.shape[1]), dtype=np.float32)]
    for index, pixels in plain_batches(data, size, ctx.device):
        with torch.no_grad():
            chunks.append(to_numpy(model.features(index, pixels)))
        if len(ctx.task.classes) == 1:
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return np.concatenate(chunks)


def _schedule(h: HgpHparams, step: int, steps: int) -> float:
    """Return the factor of both rates at a step (from 0) of a round's local training."""
    return 1.0 if h.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))
