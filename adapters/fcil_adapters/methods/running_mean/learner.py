"""The client's half: the mean thumbnail of each class of the task."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import (
    Context,
    ImageSet,
    Payload,
    Progress,
    State,
    classes_of,
)
from fcil_adapters.methods.running_mean.thumbnails import thumbnails
from fcil_adapters.numerics.class_means import class_means, class_sums

_BATCH = 256  # images in memory at a time


class Learner:
    """Stateless: the upload follows from the images."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the means (c, pixels), the counts (c,) and n."""
        classes, side = classes_of(ctx.kind, ctx.task), ctx.hparams.side
        sums = np.zeros((len(classes), side * side))  # (c, pixels)
        counts = np.zeros(len(classes), dtype=np.int64)  # (c,)
        for start in range(0, len(data), _BATCH):
            index = np.arange(start, min(start + _BATCH, len(data)), dtype=np.int64)
            small = ctx.privacy.clipped(thumbnails(data.take(index), side))  # (B, pixels)
            more = class_sums(small, data.labels[index], classes)
            sums, counts = sums + more[0], counts + more[1]
            ctx.progress(Progress(int(index[-1]) + 1, len(data)))
        means = class_means(ctx.privacy.released_sums(sums, counts), counts)
        means = np.clip(means, 0, 1).astype(np.float32)  # noise may leave the range of pixels
        return state, Payload({"mean": means, "count": counts, "n": counts.sum().reshape(1)})
