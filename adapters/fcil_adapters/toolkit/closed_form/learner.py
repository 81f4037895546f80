"""The analytic method's client half: one pass, and sums of its features (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fcil_adapters.backbones.frozen_features import feature_batches
from fcil_adapters.contract import (
    Array,
    Context,
    ImageSet,
    Payload,
    Privacy,
    State,
    classes_of,
    with_counted,
)
from fcil_adapters.numerics.class_means import class_sums
from fcil_adapters.numerics.symmetric import leading_factor, leading_factor_of, pack_triangle
from fcil_adapters.toolkit.closed_form import forms
from fcil_adapters.toolkit.closed_form.lift import make_lift, read_seed
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.pseudo_labels import PSEUDO, accepted
from fcil_adapters.toolkit.closed_form.sums import F64, I64, LOW, split

_GROUPS = 1  # purpose of the random stream


class SumsLearner:
    """The upload follows from the images and the server's projection.

    Its state names images that are counted, and nothing else.
    """

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the products of the features, their sum in each class, and the counts."""
        if ctx.kind != PSEUDO:
            return state, self._sums(ctx, classes_of(ctx.kind, ctx.task), broadcast, data)
        assert ctx.digests is not None, "the worker passes them with unlabelled images"
        images = accepted(ctx, broadcast, data)
        sent = self._sums(ctx, ctx.task.seen, broadcast, images)
        return with_counted(state, ctx.digests[images.index]), sent

    @staticmethod
    def _sums(
        ctx: Context, classes: tuple[int, ...], broadcast: Mapping[str, Payload], data: ImageSet
    ) -> Payload:
        h: AnalyticHparams = ctx.hparams
        d = ctx.backbone_info.dim
        lift = make_lift(h, d, read_seed(broadcast))
        group_of = draw_groups(ctx, data.labels)  # (N,)
        groups = int(group_of.max(initial=-1)) + 1 if h.group else 0
        grouped = np.zeros((groups, h.width(d)))  # (M, D)
        products = _Products(h, h.width(d), ctx.privacy, groups if h.group else len(data))
        sums = np.zeros((len(classes), h.width(d)))  # (c, D)
        counts = np.zeros(len(classes), dtype=np.int64)  # (c,)
        done = 0
        for features, labels in feature_batches(ctx, data):
            mine = group_of[done : done + len(labels)]
            done += len(labels)
            phi = ctx.privacy.clipped(lift(features[mine >= 0]))  # (B, D)
            more = class_sums(phi, labels[mine >= 0], classes)
            sums, counts = sums + more[0], counts + more[1]
            if h.group:
                np.add.at(grouped, mine[mine >= 0], phi)
            else:
                products.add(phi)
        if h.group:
            sizes = np.bincount(group_of[group_of >= 0], minlength=groups)  # (M,)
            products.add(grouped / np.sqrt(sizes)[:, None])
        numbers = {**products.released(), "sum": ctx.privacy.released_sums(sums, counts)}
        sent: dict[str, Array] = {
            name: array
            for name, array in split(numbers).items()
            if h.precision == "double" or not name.endswith(LOW)
        }
        sent["classes"] = np.asarray(classes, dtype=np.int64)
        sent["count"] = counts
        sent["n"] = counts.sum(dtype=np.int64).reshape(1)
        if h.group:
            sent[forms.GROUPS] = np.array([groups], dtype=np.int64)
        return Payload(sent)


def draw_groups(ctx: Context, labels: I64) -> I64:
    """Return each image's group (N,), from 0; -1: it stays at home.

    A class's images are divided at random into as many groups as have ``group`` images each; the
    rest is distributed among them. Without groups every image has one of its own. They are the same
    in every round of a task and kind: two uploads of the same images tell no more than one.
    """
    size = ctx.hparams.group
    if not size:
        return np.arange(len(labels), dtype=np.int64)
    rng = replace(ctx, round=0).rng(_GROUPS)
    found = np.full(len(labels), -1, dtype=np.int64)
    first = 0
    for c in np.unique(labels):
        images = rng.permutation(np.flatnonzero(labels == c))
        count = len(images) // size
        if count:
            found[images] = first + np.arange(len(images)) % count
        first += count
    return found


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
            return self._factored(leading_factor(rows, self._most), squares)
        gram = self._gram
        if self._privacy.on:
            gram = gram + self._privacy.released_scatter(gram[:0], diagonal=False)
        if self._truncates:
            return self._factored(leading_factor_of(gram, self._most), np.diag(gram))
        return {forms.TRIANGLE: pack_triangle(gram)}

    def _factored(self, factor: F64, diagonal: F64) -> dict[str, F64]:
        rest = np.maximum(diagonal - np.square(factor).sum(axis=0), 0)  # (D,)
        return {forms.FACTOR: factor, **({forms.REST: rest} if self._truncates else {})}
