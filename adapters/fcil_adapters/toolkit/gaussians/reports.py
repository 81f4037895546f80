"""Clients' reports on a task's classes as Gaussians: schema, payload, checks (torch-free).

A class leaves a client only if it has enough images there (`Described.min_count_upload`).

With noise, a class's mean is released first. Its covariance is then made of the residuals from that
noised mean, which is public: residuals are shorter than features, so less is clipped and no large
mean is squared into the noise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import (
    BackboneInfo,
    Context,
    Exchange,
    ImageSet,
    TaskInfo,
    classes_of,
)
from fcil_adapters.contract.privacy import Privacy, Statistic
from fcil_adapters.contract.traffic import Largest
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.class_reports import count_faults, tally, tally_specs
from fcil_adapters.numerics.symmetric import leading_factor_of, triangle_size
from fcil_adapters.toolkit.gaussians.gaussian import (
    Covariance,
    Described,
    Gaussian,
    describe,
    factor_rows,
    gaussian_faults,
    gaussian_specs,
    is_triangle,
    max_factor_rows,
    pack_gaussians,
)
from fcil_adapters.toolkit.gaussians.moment_sums import moment_sums
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import PayloadSchema


def gaussian_exchange(
    h: Described, kind: str, rows: str = "rows", *, moments: bool = False
) -> Exchange:
    """Return an exchange of one round: Gaussians of the task's classes, and counts.

    Args:
        h: the method's options.
        kind: of the exchange.
        rows: symbol of the factors' rows, where the method has another use for ``rows``.
        moments: the server needs no more than each class's mean and covariance over all clients.
    """
    upload, check = gaussian_upload(h, rows), partial(report_faults, h)
    sums = moment_sums(h) if moments else None
    return Exchange(kind, upload, rounds=1, check=check, additive=sums)


def gaussian_upload(h: Described, rows: str = "rows", classes: str = "c") -> PayloadSchema:
    """Return the schema of a report; ``classes`` is the symbol of how many it is about."""
    most = "factor_rows" if classes == "c" else f"{classes}_factor_rows"
    return PayloadSchema(
        (*gaussian_specs(h.cov, rows), *tally_specs(classes)),
        at_most=(("owned", classes), (rows, most), ("tall", classes)),
    )


def report_faults(h: Described, payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which a report contradicts itself or the task."""
    described = [n for n in payload.i64("count").tolist() if n >= h.min_count_upload]
    return count_faults(payload, task) + gaussian_faults(payload, described, h.cov, h.cov_rank)


def gaussian_dims(h: Described, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the bounds of a report of Gaussians: rows of factors, numbers of a triangle."""
    c, d = len(task.classes), backbone.dim
    rows = min(h.cov_rank if h.cov == "lowrank" else max_factor_rows(d), d)
    of_all = len(task.seen) * rows
    return {"factor_rows": c * rows, "s_factor_rows": of_all, "triangle": triangle_size(d)}


def gaussian_largest(h: Described, task: TaskInfo, rows: str = "rows") -> Largest:
    """Return the largest report: a full covariance is a triangle or a factor, never the larger."""
    return Largest({rows: 0, "tall": len(task.classes)}) if h.cov == "full" else Largest()


def gaussian_statistics(h: Described) -> tuple[Statistic, ...]:
    """Return the protected statistics: all of a report but counts."""
    covariance = tuple(spec.name for spec in gaussian_specs(h.cov)[1:])
    return (
        Statistic("class means", ("gauss.mean",)),
        Statistic("class covariances", covariance),
    )


def report_gaussians(
    ctx: Context, h: Described, features: NDArray[np.float32], data: ImageSet
) -> dict[str, Array]:
    """Return a client's report; noise is added here.

    Args:
        ctx: task and privacy.
        h: the method's options.
        features: (N, d), of all images.
        data: the images.
    """
    classes = classes_of(ctx.kind, ctx.task)
    rows = class_positions(data.labels, classes)  # (N,)
    counts = np.bincount(rows, minlength=len(classes)).astype(np.int64)  # (c,)
    owned = np.flatnonzero(counts >= h.min_count_upload)
    gaussians = [describe_with(ctx.privacy, features[rows == c], h.cov, h.cov_rank) for c in owned]
    return {
        **pack_gaussians(gaussians, features.shape[1], h.cov),
        **tally(classes, counts),
    }


def describe_with(
    privacy: Privacy, features: NDArray[Any], covariance: Covariance, rank: int
) -> Gaussian:
    """Summarise the features of one class, with noise if it is on.

    Args:
        privacy: the round's.
        features: (n, d), n >= 1, of the broadcast's model if the noise is on.
        covariance: as `gaussian.describe` has it; all forms are made of the noised scatter alone,
            so they reveal no more than it does.
        rank: q of ``lowrank``.
    """
    if not privacy.on:
        return describe(features, covariance, rank)
    x = privacy.clipped(features)
    n, d = x.shape
    mean = privacy.released_sums(x.sum(axis=0)[None], np.array([n]))[0] / n  # (d,)
    if n == 1:
        return Gaussian(1, mean, np.zeros((0, d)), np.zeros(d))
    scatter = privacy.released_scatter(x - mean, diagonal=covariance == "diag") / (n - 1)
    if covariance == "diag":
        return Gaussian(n, mean, np.zeros((0, d)), np.maximum(scatter, 0))
    rows = d if is_triangle(n, d, covariance) else factor_rows(n, d, covariance, rank)
    factor = leading_factor_of(scatter, rows)
    rest = np.diag(scatter) - np.square(factor).sum(axis=0)
    kept = np.zeros(d) if covariance == "full" else np.maximum(rest, 0)
    return Gaussian(n, mean, factor, kept)
