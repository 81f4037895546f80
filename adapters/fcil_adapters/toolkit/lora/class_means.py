"""Class means of the model at the end of a task: the shared ``finish`` exchange (torch-free).

Clients send mean features and counts (`class_reports`); the server combines them into one part per
task, ``means/<t>``, which never changes. `lora.nearest_mean` computes both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Exchange, Part, State
from fcil_adapters.contract.privacy import Statistic
from fcil_adapters.numerics.class_reports import (
    REPORT_AT_MOST,
    count_spec,
    report_faults,
    report_specs,
)
from fcil_adapters.numerics.task_parts import current_task, tagged
from fcil_adapters.numerics.weighted_sums import weighted_sums
from fcil_adapters.toolkit.heads.rows import F32, I64
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

MEANS = "means"  # kind of part; its cadence is ``CLOSED``
MEAN = "class_mean"  # the tensor; ``mean`` is that of a lone class in training

_NAMES = (MEAN, "classes")


def means_exchange(least: int) -> Exchange:
    """Return the exchange: means of the classes of which a client has ``least`` images or more."""
    specs = report_specs(MEAN)
    return Exchange(
        "finish",
        PayloadSchema(specs, at_most=REPORT_AT_MOST),
        rounds=1,
        check=partial(report_faults, least),
        additive=weighted_sums([(specs[0], "described")]),
    )


def means_schemas() -> dict[str, PayloadSchema]:
    """Return the schema of ``means/<t>``: the described classes of a task."""
    specs = (
        TensorSpec(MEAN, Kind.PROTOTYPE, ("described", "d"), exact=True),
        count_spec("classes", "described"),
    )
    meta = (MetaSpec("task", "int"),)
    return {MEANS: PayloadSchema(specs, meta, at_most=(("described", "seen"),))}


def means_statistics(kind: str) -> tuple[Statistic, ...]:
    """Return the statistics that noise protects in this exchange."""
    return (Statistic("class means", (MEAN,)),) if kind == "finish" else ()


@dataclass(frozen=True)
class ClassMeans:
    """Means of the described classes.

    Attributes:
        mean: (C, d).
        classes: (C,).
    """

    mean: F32
    classes: I64


def read_means(broadcast: Mapping[str, Payload], d: int) -> ClassMeans:
    """Read all ``means/<t>`` of a broadcast, in the order of their tasks."""
    found = sorted(
        (int(name.partition("/")[2]), payload)
        for name, payload in broadcast.items()
        if name.startswith(f"{MEANS}/")
    )
    return ClassMeans(
        np.concatenate([np.zeros((0, d), np.float32), *(p.f32(MEAN) for _, p in found)]),
        np.concatenate([np.zeros(0, np.int64), *(p.i64("classes") for _, p in found)]),
    )


def with_means(
    state: State, task: int, mean: NDArray[np.float64], counts: I64, classes: Iterable[int]
) -> State:
    """Return the state with a task's means (c, d); classes without images (c,) are left out."""
    known = counts > 0
    tensors: dict[str, Array] = {
        MEAN: mean[known].astype(np.float32),
        "classes": np.asarray(tuple(classes), dtype=np.int64)[known],
    }
    named = {f"{MEANS}.{task}.{name}": array for name, array in tensors.items()}
    return State({**state.tensors, **named}, state.meta)


def means_parts(state: State) -> tuple[Part, ...]:
    """Return the parts of the finished tasks."""
    return tuple(
        Part(f"{MEANS}/{t}", tagged({n: state.tensors[f"{MEANS}.{t}.{n}"] for n in _NAMES}, t))
        for t in range(current_task(state) + 1)
        if f"{MEANS}.{t}.{MEAN}" in state.tensors
    )
