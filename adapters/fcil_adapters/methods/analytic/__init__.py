"""Analytic: the exact linear classifier of all clients' images, from sums of frozen features.

After Tang et al., AFCL (arXiv 2505.12245), Guan et al., STSA (arXiv 2506.01327) and FedRAN (arXiv
2606.11480), with the features of McDonnell et al., RanPAC, NeurIPS 2023 (arXiv 2307.02251).

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md lists the exact and inexact
steps, and the differences from the papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Economy,
    Exchange,
    Kind,
    Largest,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    separable,
)
from fcil_adapters.methods.analytic.forms import (
    FACTOR,
    REST,
    TRIANGLE,
    largest_height,
    upload_faults,
)
from fcil_adapters.methods.analytic.lift import SEED_WORDS
from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.methods.analytic.sums import LOW, triangle_size
from fcil_adapters.numerics.class_reports import count_spec
from fcil_protocol.errors import ConfigError

# The length of phi is about 1 and at most some tens; images are at most 10^9.
_LARGEST_SUM = 1e12


def exchanges(h: AnalyticHparams, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, one round: a second one would count images twice."""
    counts = (count_spec("classes", "c"), count_spec("count", "c"), count_spec("n", 1))
    upload = PayloadSchema((*_sum_specs(h), *counts), at_most=(("rows", "most"),))
    return (Exchange("train", upload, rounds=1, check=partial(upload_faults, h)),)


def _sum_specs(h: AnalyticHparams) -> Iterator[TensorSpec]:
    """Yield the specs of the class sums, and of the feature products in each possible form."""
    shapes: dict[str, tuple[str, ...]] = {"sum": ("c", "D"), FACTOR: ("rows", "D")}
    shapes |= {REST: ("D",)} if h.truncate else {TRIANGLE: ("triangle_size",)}
    for name, shape in shapes.items():
        chosen = name in (FACTOR, TRIANGLE) and not h.truncate
        for suffix in _suffixes(h):
            yield TensorSpec(name + suffix, Kind.GRAM, shape, max_abs=_LARGEST_SUM, optional=chosen)


def _suffixes(h: AnalyticHparams) -> tuple[str, ...]:
    return ("", LOW) if h.precision == "double" else ("",)


def broadcast(_h: AnalyticHparams, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the classifier and of the projection's seed."""
    weight = TensorSpec("weight", Kind.HEAD, ("known", "D"), max_abs=_LARGEST_SUM)
    bias = TensorSpec("bias", Kind.HEAD, ("known",), max_abs=_LARGEST_SUM)
    return {
        "current": PayloadSchema(
            (weight, bias, count_spec("classes", "known")), at_most=(("known", "s"),)
        ),
        "projection": PayloadSchema((count_spec("seed", SEED_WORDS),)),
    }


def dims(h: AnalyticHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return classes c of the task and s so far, the width D, and the forms' bounds."""
    width = h.width(backbone.dim)
    return {
        "c": len(task.classes),
        "s": len(task.seen),
        "D": width,
        "triangle_size": triangle_size(width),
        "most": largest_height(h, width),
    }


def largest(h: AnalyticHparams, _b: BackboneInfo, _task: TaskInfo, _clients: int) -> Largest:
    """Return the largest upload: a triangle or a factor, which is never the larger."""
    if h.truncate:
        return Largest()
    return Largest(without_tensors=tuple(FACTOR + suffix for suffix in _suffixes(h)))


def statistics(h: AnalyticHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all tensors sent but counts.

    Raises:
        ConfigError: groups of images are asked for.
    """
    if h.group:
        raise ConfigError(
            f"method.group is {h.group}, and blanking one image of a group moves the feature "
            "products by up to twice as much as noise covers.",
            action="Set method.group to 0, or privacy.noise_multiplier to 0.",
        )
    names = [spec.name for spec in _sum_specs(h)]
    sums = tuple(n for n in names if n.startswith("sum"))
    products = tuple(n for n in names if n not in sums)
    return (Statistic("class sums", sums), Statistic("feature products", products))


def cap_ignored_reason(h: AnalyticHparams) -> str:
    """Return why the method ignores a cap on weights, unless the options obey it."""
    if h.weights == "capped":
        return ""
    return (
        'analytic counts every image once (method.weights = "images"); with "capped" it respects '
        "the cap, and its result is no longer exact"
    )


METHOD = Method(
    name="analytic",
    version="2",
    title="Analytic: exact linear classifier from sums of frozen features",
    citation="AFCL, https://arxiv.org/abs/2505.12245; RanPAC, NeurIPS 2023, "
    "https://arxiv.org/abs/2307.02251",
    hparams=AnalyticHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="fcil_adapters.methods.analytic.learner:Learner",
    aggregator="fcil_adapters.methods.analytic.aggregator:Aggregator",
    model="fcil_adapters.methods.analytic.model:Model",
    frozen=True,
    cadence={"current": Cadence.COUNTED, "projection": Cadence.RUN},
    largest=largest,
    statistics=statistics,
    forgets=separable,
    uncapped=cap_ignored_reason,
    economies=tuple(
        Economy(f"a projection to {width}", "directions of the features", {"projection": width})
        for width in (1000, 500, 250)
    ),
)
