"""Names of PLoRA's tensors and parts, and how a client reads a broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payload import Payload

F32 = NDArray[np.float32]
CURRENT = "current"
ROW_TENSORS = ("proto", "classes", "seen")


def lora_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return ``lora.<block>.<q|v>.<A|B>`` for every LoRA tensor, in a fixed order."""
    return tuple(
        f"lora.{b}.{p}.{m}" for b in sorted(blocks) for p in ("q", "v") for m in ("A", "B")
    )


def task_part(task: int) -> str:
    """Return the name of the part with a finished task's prototypes."""
    return f"task/{task}"


def teacher_part(task: int) -> str:
    """Return the name of the part with the final LoRA of a finished task."""
    return f"teacher/{task}"


@dataclass(frozen=True)
class TaskRows:
    """The prototypes of one task.

    Attributes:
        proto: (c, d), in the order of ``classes``.
        classes: (c,) global ids.
        seen: (c,), whether anybody ever had an image of the class.
    """

    proto: F32
    classes: NDArray[np.int64]
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, payload: Payload) -> TaskRows:
        """Read a part."""
        seen = payload.i64("seen").astype(bool)
        return cls(payload.f32("proto"), payload.i64("classes"), seen)

    @property
    def known(self) -> tuple[NDArray[np.int64], F32]:
        """The ids and prototypes of the classes that somebody had."""
        return self.classes[self.seen], self.proto[self.seen]


@dataclass(frozen=True)
class Received:
    """A whole broadcast.

    Attributes:
        lora: `lora_names` -> (r, d) or (d, r), the LoRA of all tasks.
        teacher: the same as the previous task ended; None at the first task or unasked.
        tasks: the finished tasks in order, then the current one.
    """

    lora: Mapping[str, F32]
    teacher: Mapping[str, F32] | None
    tasks: tuple[TaskRows, ...]

    @property
    def current(self) -> TaskRows:
        """The prototypes of the task that is being learned."""
        return self.tasks[-1]

    @property
    def past(self) -> tuple[TaskRows, ...]:
        """The finished tasks."""
        return self.tasks[:-1]


def read_parts(broadcast: Mapping[str, Payload], *, with_teacher: bool) -> Received:
    """Read a broadcast.

    Args:
        broadcast: part name -> payload.
        with_teacher: whether distillation is on, so that a teacher is needed after the
            first task.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    current = _find(broadcast, CURRENT)
    task = current.meta["task"]
    assert isinstance(task, int)
    finished = [TaskRows.of(_find(broadcast, task_part(t))) for t in range(task)]
    teacher = _find(broadcast, teacher_part(task - 1)) if with_teacher and task > 0 else None
    return Received(
        lora=_lora(current),
        teacher=None if teacher is None else _lora(teacher),
        tasks=(*finished, TaskRows.of(current)),
    )


def _find(broadcast: Mapping[str, Payload], name: str) -> Payload:
    if name not in broadcast:
        raise SchemaMismatch(
            f"the broadcast lacks the part {name!r}.",
            action="Fetch all parts of the state that the round starts from.",
        )
    return broadcast[name]


def _lora(payload: Payload) -> dict[str, F32]:
    return {name: payload.f32(name) for name in payload.tensors if name.startswith("lora.")}
