"""The client's half: describe the features of the task's images (no torch)."""

from collections.abc import Mapping

import numpy as np
from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.numerics.class_means import class_means, class_sums


class Learner:
    """Keeps no state: what it sends follows from the images alone."""

    def run(
        self,
        ctx: Context,
        state: State,
        broadcast: Mapping[str, Payload],
        data: ImageSet,
    ) -> tuple[State, Payload]:
        """Return class means (c, d), and the mean square of each feature (1, d)."""
        del broadcast  # nothing is needed from the server
        classes, d = ctx.task.classes, ctx.backbone_info.dim
        sums, squares = np.zeros((len(classes), d)), np.zeros((1, d))  # float64
        count = np.zeros(len(classes), dtype=np.int64)  # (c,)
        for features, labels in feature_batches(ctx, data):  # (b, d), (b,)
            some, more = class_sums(features, labels, classes)
            sums, count = sums + some, count + more
            squares += np.square(features, dtype=np.float64).sum(axis=0)
        n = count.sum(dtype=np.int64).reshape(1)
        return state, Payload(
            {
                "mean": class_means(sums, count).astype(np.float32),
                "square": (squares / np.maximum(n, 1)).astype(np.float32),
                "classes": np.asarray(classes, dtype=np.int64),
                "count": count,
                "n": n,
            }
        )
