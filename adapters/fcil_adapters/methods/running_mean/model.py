"""From the means to a classifier: the nearest mean wins."""

# ruff: noqa: ARG002  the contract names the arguments
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.running_mean.thumbnails import thumbnails
from fcil_protocol.payload import Payload


@dataclass(frozen=True)
class NearestMean:
    """Candidate ids, and one mean thumbnail (pixels,) per candidate."""

    classes: tuple[int, ...]
    means: NDArray[np.float32]  # (C, pixels)
    side: int

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the negative squared distances to the means: (B, C)."""
        apart = thumbnails(images, self.side)[:, None, :] - self.means  # (B, C, pixels)
        scores: NDArray[np.float32] = -np.square(apart).sum(axis=2, dtype=np.float32)
        return scores


class Model:
    """Puts the tasks of a broadcast side by side."""

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Take every class of which somebody had an image."""
        means = np.zeros((0, ctx.hparams.side**2), dtype=np.float32)
        classes: list[int] = []
        for name in sorted(broadcast, key=_order):
            part = broadcast[name]
            known = part.i64("count") > 0
            means = np.concatenate([means, part.f32("mean")[known]])
            classes.extend(part.i64("classes")[known].tolist())
        return NearestMean(tuple(classes), means, ctx.hparams.side)


def _order(part: str) -> tuple[bool, int]:
    """Sort ``task/0``, ``task/1``, ..., ``current``."""
    _, _, number = part.partition("/")
    return (not number, int(number or 0))
