"""Pseudo-labels: unlabelled images count as images of the class with the nearest mean (torch-free).

After the semi-supervised form of FedRAN (arXiv 2606.11480), which accepts an image by its cosine to
the nearest class mean alone. Here the second nearest must be clearly farther, and both cosines are
those of centred features (docs/methods/analytic.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import Array, Context, ImageSet, Kind, Payload, TensorSpec
from fcil_adapters.numerics.scores import cosines
from fcil_adapters.numerics.task_parts import CURRENT, find_part
from fcil_adapters.toolkit.closed_form.lift import make_lift, read_seed
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.sums import F64, I64, ProductSums

PSEUDO = "pseudo"  # the kind of the rounds
MEAN, GRAND = CENTRE_NAMES = ("mean", "grand")  # tensors of the classifier's part
NO_LABEL = -1


@dataclass(frozen=True)
class Centres:
    """Means of labelled images, by which unlabelled ones get their class.

    They are of the backbone's own unit features where the classifier has these, else of the
    projected ones: w numbers.

    Attributes:
        classes: (C,) ids.
        means: (C, w), of each class.
        grand: (w,), of all images.
    """

    classes: I64
    means: F64
    grand: F64

    def tensors(self) -> dict[str, Array]:
        """Return the tensors beside the classifier's, which name the classes."""
        named: dict[str, Array] = {MEAN: self.means.astype(np.float32)}
        return {**named, GRAND: self.grand.astype(np.float32)} if len(self.classes) else named

    @classmethod
    def read(cls, broadcast: Mapping[str, Payload]) -> Centres:
        """Read the centres of a broadcast.

        Raises:
            SchemaMismatch: the classifier's part is missing.
        """
        part = find_part(broadcast, CURRENT)
        means = part.f32(MEAN).astype(np.float64)
        known = GRAND in part.tensors
        grand = part.f32(GRAND).astype(np.float64) if known else np.zeros(means.shape[1])
        return cls(part.i64("classes"), means, grand)

    def labels(self, phi: F64, margin: float) -> I64:
        """Return the class of each row (B, D), or `NO_LABEL`.

        A row phi gets the class of the largest ``cos(phi - m, mu_c - m)``, m the grand mean, if the
        second largest is smaller by more than the margin. One class alone gives no label: there is
        nothing to distinguish it from.
        """
        if len(self.classes) < 2:
            return np.full(len(phi), NO_LABEL, dtype=np.int64)
        near = cosines(phi[:, : len(self.grand)] - self.grand, self.means - self.grand)  # (B, C)
        second, first = np.sort(near, axis=1)[:, -2:].T
        labels = self.classes[near.argmax(axis=1)]
        return np.where(first - second > margin, labels, NO_LABEL)


def centre_width(h: AnalyticHparams, width: int) -> int:
    """Return w, the leading part of a row's ``width`` numbers that the centres are of."""
    return width - h.projection if h.features == "both" else width


def centre_specs(h: AnalyticHparams) -> tuple[TensorSpec, ...]:
    """Return the specs of the centres; none unless unlabelled images are counted."""
    if not h.counts_unlabelled:
        return ()
    return (
        TensorSpec(MEAN, Kind.PROTOTYPE, ("known", "w")),
        TensorSpec(GRAND, Kind.PROTOTYPE, ("w",), optional=True),  # as soon as a class is known
    )


def centres_of(h: AnalyticHparams, total: ProductSums) -> Centres:
    """Return the centres of the labelled images' sums."""
    known = total.counts > 0
    counts, width = total.counts[known], centre_width(h, total.sums.shape[1])
    sums = total.sums[known, :width]
    grand = sums.sum(axis=0) / max(float(counts.sum()), 1.0)
    return Centres(total.classes[known], sums / counts[:, None], grand)


@dataclass(frozen=True)
class Labelled:
    """Some images of a set under labels of their own (`contract.ImageSet`).

    Attributes:
        images: the set.
        index: (n,), positions of these images in it.
        labels: (n,).
    """

    images: ImageSet
    index: I64
    labels: I64

    @property
    def size(self) -> int:
        """Side of the images in pixels, S."""
        return self.images.size

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: I64) -> NDArray[np.uint8]:
        """Return images (len(index), S, S, 3)."""
        return self.images.take(self.index[index])


def accepted(ctx: Context, broadcast: Mapping[str, Payload], data: ImageSet) -> Labelled:
    """Return the images that get a label.

    Classes with fewer of them than may leave the client, or than a group has, get none.
    """
    h: AnalyticHparams = ctx.hparams
    found = np.concatenate([np.zeros(0, dtype=np.int64), *_labels(ctx, broadcast, data)])
    classes, counts = np.unique(found, return_counts=True)
    few = classes[counts < max(ctx.min_count, h.group)]
    index = np.flatnonzero((found != NO_LABEL) & ~np.isin(found, few))
    return Labelled(data, index, found[index])


def _labels(ctx: Context, broadcast: Mapping[str, Payload], data: ImageSet) -> Iterator[I64]:
    h: AnalyticHparams = ctx.hparams
    centres = Centres.read(broadcast)
    lift = make_lift(h, ctx.backbone_info.dim, read_seed(broadcast))
    for features, _ in feature_batches(ctx, data):
        yield centres.labels(lift(features), h.pseudo_margin)
