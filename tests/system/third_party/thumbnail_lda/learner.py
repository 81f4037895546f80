"""The client's half: class means first, then the scatter around everybody's means."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, ImageSet, Progress, State
from fcil_adapters.numerics.class_means import class_means, class_positions, class_sums
from fcil_protocol.payloads.payload import Payload
from thumbnail_lda.features import areas, thumbnails

BATCH = 256  # decoded images in memory at a time


class Learner:
    """Keeps no state: what it sends follows from the images and the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Describe the task's images: ``mean`` (c, pixels), or ``cov`` (pixels, pixels)."""
        small = read(ctx, data)
        if ctx.kind == "prepare":
            sums, count = class_sums(small, data.labels, ctx.task.classes)
            name, value = "mean", class_means(sums, count)
        else:
            current = broadcast["current"]
            rows = class_positions(data.labels, ctx.task.classes)  # (N,)
            use = current.i64("count")[rows] > 0  # a class may have no mean: its holder was away
            apart = small[use] - current.f32("mean")[rows[use]]
            count = np.bincount(rows[use], minlength=len(ctx.task.classes))
            name, value = "cov", apart.T @ apart / max(len(apart), 1)
        n = count.sum().reshape(1)
        return state, Payload({name: value.astype(np.float32), "count": count, "n": n})


def read(ctx: Context, data: ImageSet) -> NDArray[np.float64]:
    """Return the thumbnails of all images (N, pixels)."""
    mean = areas(data.size, ctx.hparams.side)
    small = np.zeros((len(data), ctx.hparams.side**2))
    for start in range(0, len(data), BATCH):
        index = np.arange(start, min(start + BATCH, len(data)))
        small[index] = thumbnails(data.take(index), mean)
        ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return small
