"""Both ends of `lora.class_means`: client, server, and the nearest-mean classifier (torch)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Context, ImageSet, State, Updates
from fcil_adapters.numerics.class_reports import federated_means, report_tensors
from fcil_adapters.numerics.scores import cosines
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.distances import squared_distances
from fcil_adapters.toolkit.heads.scorer import Head, LinearLayer, Scorer
from fcil_adapters.toolkit.lora.class_means import MEAN, ClassMeans, with_means
from fcil_adapters.toolkit.lora.halves import view_scorer
from fcil_adapters.toolkit.lora.manifest import LoraBroadcast
from fcil_adapters.toolkit.lora.views import merged_view
from fcil_adapters.toolkit.training.optimise import sum_features
from fcil_protocol.payloads.payload import Payload


def report_means(ctx: Context, received: LoraBroadcast, data: ImageSet) -> Payload:
    """Return the mean features of the task's classes under the broadcast's model."""
    h = ctx.hparams
    view = merged_view(ctx.backbone, h, received.lora)

    def features(pixels: Tensor) -> Tensor:
        return cls_features(view, ctx.backbone.normalise(pixels))

    sums = sum_features(ctx, features, data, batch_size=h.batch_size, report=True)
    told = report_tensors(ctx.task.classes, sums.means, sums.counts, h.min_count_upload, MEAN)
    return Payload(told)


def merge_reports(ctx: Context, state: State, updates: Updates) -> State:
    """Return the state with the means over all clients' images."""
    classes = ctx.task.classes
    means, counts = federated_means(updates, classes, ctx.max_weight_share, MEAN)
    return with_means(state, ctx.task.index, means, counts, classes)


def nearest_scorer(
    ctx: Context, backbone: Backbone, view: Any, means: ClassMeans, *, cosine: bool
) -> Scorer:
    """Return the classifier by the nearest mean.

    Args:
        ctx: micro-batch.
        backbone: normalises images.
        view: gives their features.
        means: the candidates.
        cosine: compare directions; else a score is a negative squared distance.
    """
    rows = to_torch(means.mean, backbone.device)  # (C, d)

    def score(features: Tensor) -> Tensor:
        if not cosine:
            return -squared_distances(features, rows)
        scores: Tensor = cosines(features, rows)
        return scores

    layer = LinearLayer.cosine(rows) if cosine else LinearLayer.nearest(rows)
    head = Head(tuple(int(c) for c in means.classes), score, layer)
    return view_scorer(ctx, backbone, view, head)
