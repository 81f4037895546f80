"""The Gaussian head's client half: one pass, and a Gaussian of each class (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.gaussian_head.options import GaussianHeadHparams
from fcil_adapters.toolkit.gaussians.reports import report_gaussians


class Learner:
    """Stateless: the upload follows from the images."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the Gaussians of the classes with enough images, and the counts."""
        h: GaussianHeadHparams = ctx.hparams
        none = np.zeros((0, ctx.backbone_info.dim), dtype=np.float32)
        features = np.concatenate([none, *(x for x, _ in feature_batches(ctx, data))])  # (N, d)
        return state, Payload(report_gaussians(ctx, h, features, data))
