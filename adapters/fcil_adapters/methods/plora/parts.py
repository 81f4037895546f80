"""The parts of PLoRA's broadcast, and their reader (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Payload
from fcil_adapters.numerics.task_parts import find_part, of_all_tasks
from fcil_adapters.toolkit.lora.low_rank import Changes
from fcil_adapters.toolkit.lora.tensors import lora_of
from fcil_adapters.toolkit.prototypes.rows import PrototypeRows

F32 = NDArray[np.float32]


def lora_part(task: int) -> str:
    """Return the name of the part with the LoRA at the end of a task's rounds.

    The latest one continues; at the beginning of a task it is that of an earlier task, which stays
    as the teacher.
    """
    return f"lora/{task}"


@dataclass(frozen=True)
class Received:
    """A complete broadcast.

    Attributes:
        lora: `lora_names` -> (r, d) or (d, r), the LoRA of all tasks.
        teacher: the same at the end of the previous task; None at the first task or unasked.
        tasks: the prototypes of the finished tasks in order, then of the current one.
    """

    lora: Mapping[str, F32]
    teacher: Mapping[str, F32] | None
    tasks: tuple[PrototypeRows, ...]


def read_parts(broadcast: Mapping[str, Payload], *, with_teacher: bool) -> Received:
    """Read a broadcast.

    Args:
        broadcast: part name -> payload.
        with_teacher: True if distillation is on, so that a teacher is needed after the first task.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    tasks = of_all_tasks(broadcast)
    task = len(tasks) - 1
    with_lora = sorted(t for t in range(task + 1) if lora_part(t) in broadcast)
    earlier = [t for t in with_lora if t < task]
    lora = find_part(broadcast, lora_part(with_lora[-1] if with_lora else task))
    teacher = None
    if with_teacher and task > 0:
        teacher = find_part(broadcast, lora_part(earlier[-1] if earlier else task - 1))
    return Received(
        lora=lora_of(lora),
        teacher=None if teacher is None else lora_of(teacher),
        tasks=tuple(PrototypeRows.of(part.tensors) for part in tasks),
    )


def weight_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return the change by the LoRA of all tasks, for the export of an adapter."""
    return Changes.of(ctx.hparams.scale, [read_parts(broadcast, with_teacher=False).lora])
