"""Prototypes of a task's classes: exchanges, schemas, first values, reading (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Exchange, TaskInfo
from fcil_adapters.contract.privacy import Statistic
from fcil_adapters.numerics.class_reports import (
    REPORT_AT_MOST,
    count_spec,
    report_faults,
    report_specs,
)
from fcil_adapters.toolkit.prototypes.options import PrototypeHparams
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Array
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

F32 = NDArray[np.float32]
ROW_TENSORS = ("proto", "classes", "seen")

_SPREAD = 0.1  # standard deviation of random prototypes


@dataclass(frozen=True)
class PrototypeRows:
    """The prototypes of one task.

    Attributes:
        proto: (c, d), in the order of ``classes``.
        classes: (c,) global ids.
        seen: (c,), True if any client ever had an image of the class.
    """

    proto: F32
    classes: NDArray[np.int64]
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, tensors: Mapping[str, Array]) -> PrototypeRows:
        """Read the `ROW_TENSORS`."""
        return cls(
            np.asarray(tensors["proto"], dtype=np.float32),
            np.asarray(tensors["classes"], dtype=np.int64),
            np.asarray(tensors["seen"], dtype=np.int64).astype(bool),
        )

    @classmethod
    def first(cls, proto: F32, classes: Sequence[int]) -> PrototypeRows:
        """Return the rows of a new task; no class has been seen yet."""
        ids = np.asarray(classes, dtype=np.int64)
        return cls(proto, ids, np.zeros(len(ids), dtype=bool))

    @property
    def tensors(self) -> dict[str, Array]:
        """The `ROW_TENSORS`."""
        values = (self.proto, self.classes, self.seen.astype(np.int64))
        return dict(zip(ROW_TENSORS, values, strict=True))


def known(many: Iterable[PrototypeRows], d: int) -> tuple[tuple[int, ...], F32]:
    """Return the ids and prototypes (C, d) of the classes that any client had, in order."""
    rows = tuple(many)
    classes = tuple(int(c) for one in rows for c in one.classes[one.seen])
    none = np.zeros((0, d), dtype=np.float32)
    return classes, np.concatenate([none, *(one.proto[one.seen] for one in rows)])


def prototype_spec(name: str, rows: str) -> TensorSpec:
    """Return the spec of prototypes; the symbol ``d`` is their width."""
    return TensorSpec(name, Kind.PROTOTYPE, (rows, "d"))


def row_specs(rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of the `ROW_TENSORS`."""
    return (prototype_spec("proto", rows), count_spec("classes", rows), count_spec("seen", rows))


def prototype_exchanges(h: PrototypeHparams, lora: tuple[TensorSpec, ...]) -> tuple[Exchange, ...]:
    """Return the exchanges of a task: class means first (if used), then the training rounds.

    Args:
        h: start of the prototypes, least images for sending a mean.
        lora: the LoRA tensors that clients train and send.
    """
    check = partial(report_faults, h.min_count_upload)
    trained = PayloadSchema(
        (*lora, prototype_spec("proto", "c"), *report_specs()), at_most=REPORT_AT_MOST
    )
    train = Exchange("train", trained, check=check)
    if h.init != "class_means":
        return (train,)
    report = PayloadSchema(report_specs(), at_most=REPORT_AT_MOST)
    return (Exchange("prepare", report, rounds=1, check=check), train)


def prototype_statistics(h: PrototypeHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics of ``prepare`` and ``train``: the class means.

    Raises:
        ConfigError: the option takes the means from the training.
    """
    if h.mean_from == "training":
        raise ConfigError(
            "method.mean_from is 'training', and noise cannot cover means of a model that changes "
            "with each image.",
            action="Set method.mean_from to 'eval', or privacy.noise_multiplier to 0.",
        )
    return (Statistic("class means", ("mean",)),)


def draw_prototypes(rows: int, d: int, rng: np.random.Generator) -> F32:
    """Draw prototypes (rows, d) from 0.1 N(0, I)."""
    return (_SPREAD * rng.standard_normal((rows, d))).astype(np.float32)
