"""Nearest-prototype prediction on an adapted view of the backbone (torch)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.distances import squared_distances
from fcil_adapters.toolkit.heads.scorer import LinearLayer, Scorer
from fcil_adapters.toolkit.prototypes.rows import PrototypeRows, known


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
