"""Manifests of methods that add up sums of features: their exchange, parts and statistics.

The halves are `learner`, `aggregator` and `model`; a method without its own names these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Economy,
    Exchange,
    Kind,
    Largest,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    check_of_all_classes,
    separable,
)
from fcil_adapters.numerics.class_reports import count_spec
from fcil_adapters.numerics.symmetric import triangle_size
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.numerics.weighted_sums import with_common_bytes
from fcil_adapters.toolkit.closed_form.forms import (
    FACTOR,
    GROUPS,
    REST,
    TRIANGLE,
    additive_sums,
    largest_height,
    upload_faults,
)
from fcil_adapters.toolkit.closed_form.lift import PROJECTION, SEED_WORDS
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.pseudo_labels import PSEUDO, centre_specs, centre_width
from fcil_adapters.toolkit.closed_form.sums import LOW
from fcil_protocol.errors import ConfigError

# The length of phi is about 1 and at most some tens; images are at most 10^9.
_LARGEST_SUM = 1e12

SUMS_ECONOMIES = tuple(
    Economy(f"a projection to {width}", "directions of the features", {"projection": width})
    for width in (1000, 500, 250)
)


def sums_exchanges(
    h: AnalyticHparams,
    kind: str = "train",
    common: TensorSpec | None = None,
    *,
    height: str = "rows",
) -> tuple[Exchange, ...]:
    """Return the exchange of the sums, one round: a second one would count images twice.

    If unlabelled images are counted, an exchange of their sums follows; if late ones are, one of
    theirs.

    Args:
        h: the options.
        kind: of the exchange.
        common: a further tensor of an upload, bytes that are the same for all clients.
        height: the symbol of a factor's rows; none of the method's ``dims``.
    """
    more = () if common is None else (common,)
    upload = _upload(h, more, height, "c")
    check = partial(upload_faults, h)
    additive = additive_sums(h)
    if additive is not None and common is not None:
        additive = with_common_bytes(additive, common)
    sums = Exchange(kind, upload, rounds=1, check=check, additive=additive)
    if not h.counts_unlabelled:
        return h.with_late_exchange(sums, _upload(h, more, height, "s"))
    pseudo = Exchange(
        PSEUDO,
        _upload(h, more, height, "s"),
        rounds=1,
        check=check_of_all_classes(check),
        keeps_state=True,
        unlabelled=h.pseudo_images,
        least_accuracy=h.pseudo_accuracy,
    )
    return (*h.with_late_exchange(sums, _upload(h, more, height, "s")), pseudo)


def _upload(
    h: AnalyticHparams, more: tuple[TensorSpec, ...], height: str, classes: str
) -> PayloadSchema:
    counts = [count_spec("classes", classes), count_spec("count", classes), count_spec("n", 1)]
    counts += [count_spec(GROUPS, 1)] if h.group else []
    specs = (*_sum_specs(h, height, classes), *counts, *more)
    return PayloadSchema(specs, at_most=((height, "most"),))


def _sum_specs(
    h: AnalyticHparams, height: str = "rows", classes: str = "c"
) -> Iterator[TensorSpec]:
    """Yield the specs of the class sums, and of the feature products in each possible form."""
    shapes: dict[str, tuple[str, ...]] = {"sum": (classes, "D"), FACTOR: (height, "D")}
    shapes |= {REST: ("D",)} if h.truncate else {TRIANGLE: ("triangle_size",)}
    for name, shape in shapes.items():
        chosen = name in (FACTOR, TRIANGLE) and not h.truncate
        for suffix in _suffixes(h):
            yield TensorSpec(name + suffix, Kind.GRAM, shape, max_abs=_LARGEST_SUM, optional=chosen)


def _suffixes(h: AnalyticHparams) -> tuple[str, ...]:
    return ("", LOW) if h.precision == "double" else ("",)


def classifier_schemas(h: AnalyticHparams) -> dict[str, PayloadSchema]:
    """Return the schemas of the classifier and of the projection's seed."""
    weight = TensorSpec("weight", Kind.HEAD, ("known", "D"), max_abs=_LARGEST_SUM, exact=True)
    bias = TensorSpec("bias", Kind.HEAD, ("known",), max_abs=_LARGEST_SUM, exact=True)
    return {
        CURRENT: PayloadSchema(
            (weight, bias, count_spec("classes", "known"), *centre_specs(h)),
            at_most=(("known", "s"),),
        ),
        PROJECTION: PayloadSchema((count_spec("seed", SEED_WORDS),)),
    }


def classifier_cadence(counted: Cadence = Cadence.COUNTED) -> dict[str, Cadence]:
    """Return when these parts change; ``counted``: after the rounds of the sums."""
    return {CURRENT: counted, PROJECTION: Cadence.RUN}


def sums_dims(h: AnalyticHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return classes c of the task and s so far, the width D, and the forms' bounds."""
    width = h.width(backbone.dim)
    return {
        "c": len(task.classes),
        "s": len(task.seen),
        "D": width,
        "w": centre_width(h, width),
        "triangle_size": triangle_size(width),
        "most": largest_height(h, width),
    }


def sums_largest(h: AnalyticHparams, _b: BackboneInfo, _task: TaskInfo, _clients: int) -> Largest:
    """Return the largest upload: a triangle or a factor, which is never the larger."""
    if h.truncate:
        return Largest()
    return Largest(without_tensors=tuple(FACTOR + suffix for suffix in _suffixes(h)))


def sums_statistics(h: AnalyticHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all tensors of the sums but counts.

    Raises:
        ConfigError: groups of images are asked for, or pseudo-labels.
    """
    if h.counts_unlabelled:
        raise ConfigError(
            f"method.pseudo is {h.pseudo!r}, and the counts of pseudo-labels follow from the "
            "images, which noise does not cover.",
            action="Set method.pseudo to 'off', or privacy.noise_multiplier to 0.",
        )
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


def sums_forget(h: AnalyticHparams) -> str:
    """Return why no client can be forgotten exactly; empty: one can."""
    if h.counts_unlabelled:
        return "the pseudo-labels of all clients follow from a model that it helped to make"
    return separable(h)


def cap_ignored_reason(name: str, h: AnalyticHparams) -> str:
    """Return why a method ignores a cap on weights, unless the options obey it."""
    if h.weights == "capped":
        return ""
    return (
        f'{name} counts every image once (method.weights = "images"); with "capped" it respects '
        "the cap, and its result is no longer exact"
    )
