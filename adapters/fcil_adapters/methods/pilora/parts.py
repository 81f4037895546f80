"""The parts of PILoRA's broadcast, and their reader (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Payload
from fcil_adapters.numerics.task_parts import CURRENT, find_part, of_all_tasks
from fcil_adapters.toolkit.lora.tensors import lora_of
from fcil_adapters.toolkit.prototypes.rows import PrototypeRows

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class TaskPart:
    """One task in a broadcast.

    Attributes:
        lora: `lora_names` -> (r, d) or (d, r).
        rows: the prototypes of the task's classes.
    """

    lora: Mapping[str, F32]
    rows: PrototypeRows

    @classmethod
    def of(cls, payload: Payload) -> TaskPart:
        """Read a part."""
        return cls(lora_of(payload), PrototypeRows.of(payload.tensors))


def read_parts(broadcast: Mapping[str, Payload]) -> tuple[TaskPart, ...]:
    """Read a broadcast: the finished tasks in order, then the current one.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    return tuple(TaskPart.of(part) for part in of_all_tasks(broadcast))


def future_rows(broadcast: Mapping[str, Payload], d: int) -> F32:
    """Return (f, d), the fixed negatives of classes still to come; no rows without them."""
    current = find_part(broadcast, CURRENT)
    none = np.zeros((0, d), dtype=np.float32)
    return current.f32("future") if "future" in current.tensors else none
