"""FedProto's parts of a broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Payload
from fcil_adapters.numerics.task_parts import of_all_tasks

PROTO = "proto"  # parts with a task's prototypes
NAMES = ("proto", "classes", "seen")


def proto_part(task: int) -> str:
    """Return the name of the part with a task's prototypes."""
    return f"{PROTO}/{task}"


def read_prototypes(
    broadcast: Mapping[str, Payload],
) -> tuple[tuple[int, ...], NDArray[np.float32]]:
    """Return the classes with prototypes, in order of tasks, and their prototypes (C, d).

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    parts = of_all_tasks(broadcast, PROTO)
    seen = np.concatenate([part.i64("seen") for part in parts]) > 0
    classes = np.concatenate([part.i64("classes") for part in parts])[seen]
    return tuple(classes.tolist()), np.concatenate([part.f32("proto") for part in parts])[seen]
