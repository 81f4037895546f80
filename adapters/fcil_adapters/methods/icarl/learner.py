"""iCaRL's client half: train with exemplars, then choose new ones and send class means (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fcil_adapters.backbones.backbone import cls_features
from fcil_adapters.contract import (
    Array,
    Context,
    ImageSet,
    Joined,
    Payload,
    Progress,
    State,
    class_share,
    herd,
    with_exemplars,
)
from fcil_adapters.methods.icarl.options import IcarlHparams
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.scores import unit_rows
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.distillation import SigmoidTargets
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.views import merged_view
from fcil_adapters.toolkit.training.optimise import class_counts
from fcil_adapters.toolkit.training.prefetch import plain_batches

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Learner:
    """The state names exemplars; a client without any, such as a late one, still trains."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train on new images and exemplars, or end the task."""
        received = read_parts(ctx.hparams, broadcast)
        again = None if ctx.exemplars is None else ctx.exemplars.images
        if ctx.kind == "finish":
            view = merged_view(ctx.backbone, ctx.hparams, received.lora)
            images = data if again is None else Joined(data, again)
            features = _unit_features(ctx, view, images)
            state, chosen = _choose(ctx, state, features, images.labels, len(data))
            return state, Payload(_told(ctx, data, features, images.labels, chosen))
        bench = LoraSetup.of(ctx, received)
        loss = SigmoidTargets.of(ctx, bench, received)
        return state, Payload(train_round(ctx, bench, data, loss=loss, beside=again))


def _unit_features(ctx: Context, view: Any, images: ImageSet) -> F64:
    """Return the features of all images, unaugmented, each of length 1: (N, d)."""
    features = np.zeros((len(images), ctx.backbone_info.dim))
    size = ctx.micro_batch or ctx.hparams.batch_size
    for index, pixels in plain_batches(images, size, ctx.device):
        with torch.no_grad():
            features[index] = to_numpy(cls_features(view, ctx.backbone.normalise(pixels)))
        ctx.progress(Progress(int(index[-1]) + 1, len(images)))
    return np.asarray(unit_rows(features))


def _choose(
    ctx: Context, state: State, features: F64, labels: I64, fresh: int
) -> tuple[State, I64]:
    """Choose the exemplars of new classes, and keep the first ones of each past class.

    Args:
        ctx: options, and the exemplars that the worker opened.
        state: names the exemplars so far.
        features: (N, d), of the task's images and then of the exemplars.
        labels: (N,).
        fresh: number of the task's images among them.

    Returns:
        The state that names the exemplars from here on (Algorithms 4 and 5), and their positions; a
            context without exemplars keeps none.
    """
    h: IcarlHparams = ctx.hparams
    share = class_share(h.memory, len(set(labels.tolist())))
    chosen: list[I64] = []
    for c in (*ctx.task.past, *ctx.task.classes):
        own = np.flatnonzero(labels == c)
        # Exemplars are in the order of their choice, so the first are the best (Algorithm 5).
        chosen.append(own[:share] if c in ctx.task.past else own[herd(features[own], share)])
    positions = np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
    if ctx.exemplars is None:
        return state, positions
    known = np.concatenate([ctx.exemplars.current, ctx.exemplars.digests])  # (N, 32)
    assert len(known) == len(labels)
    assert fresh == len(ctx.exemplars.current)
    return with_exemplars(state, known[positions]), positions


def _told(
    ctx: Context, data: ImageSet, features: F64, labels: I64, chosen: I64
) -> dict[str, Array]:
    """Return the mean features of all classes with images here, and the counts of the task's."""
    h: IcarlHparams = ctx.hparams
    counts = class_counts(data, ctx.task.classes)
    means, owned, behind = [], [], []
    for c in ctx.task.seen:
        own = np.flatnonzero(labels == c)
        if h.means_from == "exemplars" and c in ctx.task.classes:
            own = chosen[labels[chosen] == c]
        if len(own) >= h.min_count_upload:
            means.append(features[own].mean(axis=0))
            owned.append(c)
            behind.append(len(own))
    d = ctx.backbone_info.dim
    return {
        "means": np.array(means, dtype=np.float32).reshape(len(means), d),
        "owned": np.array(owned, dtype=np.int64),
        "images": np.array(behind, dtype=np.int64),
        **tally(ctx.task.classes, counts),
    }
