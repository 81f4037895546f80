"""Gaussian head: a linear head from Gaussians of frozen features, without a gradient on clients.

The statistics of Salami et al., Federated Class-Incremental Learning with Hierarchical Generative
Prototypes, 2024, https://arxiv.org/abs/2406.02447, on the frozen backbone; calibration with
Gaussians after Luo et al., No Fear of Heterogeneity (CCVR), NeurIPS 2021,
https://arxiv.org/abs/2106.05001.

Manifest (no torch): hyper-parameters, exchanges, schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Economy,
    Exchange,
    Largest,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
    late_cap_ignored_reason,
    separable,
)
from fcil_adapters.methods.gaussian_head.options import GaussianHeadHparams
from fcil_adapters.toolkit.gaussians.discriminant_head import linear_specs, quadratic_specs
from fcil_adapters.toolkit.gaussians.reports import (
    gaussian_dims,
    gaussian_exchange,
    gaussian_largest,
    gaussian_statistics,
    gaussian_upload,
)


def exchanges(h: GaussianHeadHparams, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task: Gaussians of its classes and counts; and late ones."""
    train = gaussian_exchange(h, "train", moments=h.head != "trained")
    return h.with_late_exchange(train, gaussian_upload(h, classes="s"))


def broadcast(h: GaussianHeadHparams, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schema of the only part: the head of all described classes."""
    head = quadratic_specs() if h.head == "quadratic" else linear_specs()
    return {"current": PayloadSchema(head, at_most=(("known", "s"),))}


def dims(h: GaussianHeadHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, classes c of the task and s so far, and the Gaussians' bounds."""
    known = {"d": backbone.dim, "c": len(task.classes), "s": len(task.seen)}
    return {**known, "own_rank": h.own_rank, **gaussian_dims(h, backbone, task)}


def largest(h: GaussianHeadHparams, _b: BackboneInfo, task: TaskInfo, _clients: int) -> Largest:
    """Return the largest report: a full covariance is a triangle or a factor, never the larger."""
    return gaussian_largest(h, task)


def statistics(h: GaussianHeadHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all tensors sent but counts."""
    return gaussian_statistics(h)


METHOD = Method(
    name="gaussian_head",
    version="2",
    title="Gaussian head: linear head from Gaussians of frozen features",
    citation="After R. Salami et al., https://arxiv.org/abs/2406.02447, and M. Luo et al., "
    "NeurIPS 2021, https://arxiv.org/abs/2106.05001",
    hparams=GaussianHeadHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="fcil_adapters.methods.gaussian_head.learner:Learner",
    aggregator="fcil_adapters.methods.gaussian_head.aggregator:Aggregator",
    model="fcil_adapters.methods.gaussian_head.model:Model",
    frozen=True,
    cadence={"current": Cadence.COUNTED},
    largest=largest,
    statistics=statistics,
    forgets=separable,
    uncapped=late_cap_ignored_reason,
    economies=(
        Economy("covariances of rank 4", "all but 4 eigenvalues", {"cov_rank": 4}),
        Economy("diagonal covariances", "how features vary together", {"cov": "diag"}),
    ),
)
