"""The analytic method's client half: one pass, and sums of its features (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import Array, Context, ImageSet, Payload, Privacy, State
from fcil_adapters.methods.analytic import forms
from fcil_adapters.methods.analytic.lift import make_lift
from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.methods.analytic.parts import read_seed
from fcil_adapters.methods.analytic.sums import F64, LOW, pack_triangle, split
from fcil_adapters.numerics.class_means import class_sums


class Learner:
    """Stateless: the upload follows from the images and the server's projection."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the products of the features, their sum in each class, and the counts."""
        h: AnalyticHparams = ctx.hparams
        classes, d = ctx.task.classes, ctx.backbone_info.dim
        lift = make_lift(h, d, read_seed(broadcast))
        products = _Products(h, h.width(d), ctx.privacy, len(data))
        sums = np.zeros((len(classes), h.width(d)))  # (c, D)
        counts = np.zeros(len(classes), dtype=np.int64)  # (c,)
        for features, labels in feature_batches(ctx, data):
            phi = ctx.privacy.clipped(lift(features))  # (B, D)
            more = class_sums(phi, labels, classes)
            sums, counts = sums + more[0], counts + more[1]
            products.add(phi)
        numbers = {**products.released(), "sum": ctx.privacy.released_sums(sums, counts)}
        sent: dict[str, Array] = {
            name: array
            for name, array in split(numbers).items()
            if h.precision == "double" or not name.endswith(LOW)
        }
        sent["classes"] = np.asarray(classes, dtype=np.int64)
        sent["count"] = counts
        sent["n"] = counts.sum(dtype=np.int64).reshape(1)
        return state, Payload(sent)


class _Products:
    """Adds up phi^T phi: as rows while those of all images are the smaller form, else as G."""

    def __init__(self, h: AnalyticHparams, width: int, privacy: Privacy, images: int) -> None:
        self._truncates = h.truncate > 0
        self._most = forms.largest_height(h, width)
        self._privacy = privacy
        # Noise leaves no factor of few rows: it is added to all of G.
        self._few = images <= (width + 1) // 2 and not privacy.on
        self._rows: list[F64] = [np.zeros((0, width))]
        self._gram = np.zeros((0, 0) if self._few else (width, width))

    def add(self, phi: F64) -> None:
        if self._few:
            self._rows.append(phi)
        else:
            self._gram += phi.T @ phi

    def released(self) -> dict[str, F64]:
        """Return ``factor`` (r, D), with ``rest`` (D,) if truncated, or ``triangle``."""
        if self._few:
            rows = np.concatenate(self._rows)
            squares = np.square(rows).sum(axis=0)  # (D,), the diagonal of G
            return self._factored(forms.leading_factor(rows, self._most), squares)
        gram = self._gram
        if self._privacy.on:
            gram = gram + self._privacy.released_scatter(gram[:0], diagonal=False)
        if self._truncates:
            return self._factored(forms.leading_factor_of(gram, self._most), np.diag(gram))
        return {forms.TRIANGLE: pack_triangle(gram)}

    def _factored(self, factor: F64, diagonal: F64) -> dict[str, F64]:
        rest = np.maximum(diagonal - np.square(factor).sum(axis=0), 0)  # (D,)
        return {forms.FACTOR: factor, **({forms.REST: rest} if self._truncates else {})}
