"""FedNCM's client half: the mean frozen feature of each class of the task (torch-free)."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import Context, ImageSet, Payload, State, classes_of
from fcil_adapters.numerics.class_means import class_means, class_sums


class Learner:
    """Stateless: the upload follows from the images."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the means (c, d), zero where there is no image, the counts (c,) and n."""
        classes = classes_of(ctx.kind, ctx.task)
        sums = np.zeros((len(classes), ctx.backbone_info.dim))  # (c, d)
        counts = np.zeros(len(classes), dtype=np.int64)  # (c,)
        for features, labels in feature_batches(ctx, data):
            more = class_sums(ctx.privacy.clipped(features), labels, classes)
            sums, counts = sums + more[0], counts + more[1]
        means = class_means(ctx.privacy.released_sums(sums, counts), counts)
        return state, Payload(
            {
                "mean": means.astype(np.float32),
                "classes": np.asarray(classes, dtype=np.int64),
                "count": counts,
                "n": counts.sum(dtype=np.int64).reshape(1),
            }
        )
