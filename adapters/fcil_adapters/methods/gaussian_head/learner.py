"""The Gaussian head's client half: one pass, and a Gaussian of each class (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.frozen_features import feature_batches
from fcil_adapters.gaussians import pack_gaussians
from fcil_adapters.methods.gaussian_head.options import GaussianHeadHparams
from fcil_adapters.private_gaussians import describe_with
from fcil_adapters.statistics import class_positions
from fcil_protocol.payload import Payload


class Learner:
    """Keeps no state: what it sends follows from the images."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the Gaussians of the classes with enough images, and the counts."""
        h: GaussianHeadHparams = ctx.hparams
        classes, d = ctx.task.classes, ctx.backbone_info.dim
        none = np.zeros((0, d), dtype=np.float32)
        features = np.concatenate([none, *(x for x, _ in feature_batches(ctx, data))])  # (N, d)
        rows = class_positions(data.labels, classes)  # (N,)
        counts = np.bincount(rows, minlength=len(classes)).astype(np.int64)  # (c,)
        owned = np.flatnonzero(counts >= h.min_count_upload)
        gaussians = [
            describe_with(ctx.privacy, features[rows == c], h.cov, h.cov_rank) for c in owned
        ]
        return state, Payload(
            {
                **pack_gaussians(gaussians, d, h.cov),
                "classes": np.asarray(classes, dtype=np.int64),
                "count": counts,
                "n": counts.sum(dtype=np.int64).reshape(1),
            }
        )
