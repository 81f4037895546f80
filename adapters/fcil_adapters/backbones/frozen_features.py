"""Features of the frozen backbone for methods without a gradient (torch-free).

Such a method uses the backbone through `Extractor` alone, so any engine that can compute the
features will do. Its learner and its model import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.feature_cache import plain_tap
from fcil_adapters.contract import BackboneInfo, Context, ImageSet, Progress

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_BATCH = 256  # images in memory and in one pass, unless the device takes fewer


class Extractor(Protocol):
    """A loaded backbone of any engine."""

    def features(self, images: NDArray[np.uint8]) -> F32:
        """Return the CLS features (B, d) of preprocessed images (B, S, S, 3)."""
        ...


class ReplaceableWeights(Extractor, Protocol):
    """The same, for methods that change some of its weights once and for all.

    Attributes:
        info: its description.
        alive: called at the beginning of every pass.
        variant: the last result of `with_weights`, kept as long as this backbone; None at first.
    """

    info: BackboneInfo
    alive: Callable[[], None]
    variant: Any

    def weight(self, name: str) -> F32:
        """Return one weight, by its name in torch's state dict."""
        ...

    def with_weights(self, weights: Mapping[str, F32], digest: str) -> Any:
        """Return a backbone with some weights replaced and this digest, of the same engine."""
        ...


def plain_features(extractor: Any, images: NDArray[np.uint8]) -> F32:
    """Return the features (B, d) of plain images (B, S, S, 3), from a store if there is one.

    Only an experiment on this machine has one; everywhere else all features are computed.

    Args:
        extractor: an `Extractor`; one with a store is a `backbone.Backbone`.
        images: preprocessed, not augmented; at least one.
    """
    memory = getattr(extractor, "memory", None)
    if memory is None or memory.store is None:
        features: F32 = extractor.features(images)
    else:
        features = memory.of(images, plain_tap(extractor.info), extractor.features)
    return features


def feature_batches(ctx: Context, data: ImageSet) -> Iterator[tuple[F32, I64]]:
    """Yield features (B, d) and class ids (B,) of all images, in order."""
    extractor: Extractor = ctx.backbone
    size = ctx.micro_batch or _BATCH
    for start in range(0, len(data), size):
        index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
        yield plain_features(extractor, data.take(index)), data.labels[index]
        ctx.progress(Progress(int(index[-1]) + 1, len(data)))


@dataclass(frozen=True)
class FeatureScorer:
    """A classifier on frozen features (`contract.Predictor`).

    Its score uses only operations that numpy's arrays and torch's tensors share
    (`numerics.scores`), so that the same function runs here with numpy and goes into an export with
    torch.

    Attributes:
        classes: candidate ids, one per column.
        extractor: gives the features; None: the pixels themselves, (b, S, S, 3) in [0, 255].
        score: features (b, d) and the weights -> scores (b, C); it works for any b.
        weights: the numbers of the score, float64; in an export they are float32.
        micro_batch: largest b; None: as many as fit one pass by default.
    """

    classes: tuple[int, ...]
    extractor: Extractor | None
    score: Callable[..., Any]
    weights: tuple[NDArray[np.float64], ...]
    micro_batch: int | None

    def logits(self, images: NDArray[np.uint8]) -> F32:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        scores = np.zeros((len(images), len(self.classes)), dtype=np.float32)
        size = self.micro_batch or _BATCH
        for start in range(0, len(images), size):
            some = slice(start, start + size)
            seen: NDArray[Any] = images[some]
            if self.extractor is not None:
                seen = plain_features(self.extractor, seen)
            scores[some] = self.score(seen.astype(np.float64), *self.weights)
        return scores
