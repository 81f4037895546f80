"""Tensor names of PILoRA's payloads, and what clients may say about their classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payload import Payload

F32 = NDArray[np.float32]
CURRENT = "current"


def lora_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return ``lora.<block>.<q|v>.<A|B>`` for every LoRA tensor, in a fixed order."""
    return tuple(
        f"lora.{b}.{p}.{m}" for b in sorted(blocks) for p in ("q", "v") for m in ("A", "B")
    )


def task_part(task: int) -> str:
    """Return the name of the part that holds a finished task."""
    return f"task/{task}"


@dataclass(frozen=True)
class TaskPart:
    """What a broadcast holds of one task.

    Attributes:
        index: t.
        lora: `lora_names` -> (r, d) or (d, r).
        proto: (c, d), in the order of ``classes``.
        classes: (c,) global ids.
        seen: (c,), whether anybody ever had an image of the class.
        future: (f, d) fixed negatives of classes still to come; no rows without them.
    """

    index: int
    lora: Mapping[str, F32]
    proto: F32
    classes: NDArray[np.int64]
    seen: NDArray[np.bool_]
    future: F32

    @property
    def known(self) -> tuple[NDArray[np.int64], F32]:
        """The ids and prototypes of the classes that somebody had."""
        return self.classes[self.seen], self.proto[self.seen]


def read_parts(broadcast: Mapping[str, Payload]) -> tuple[TaskPart, ...]:
    """Read a broadcast: the finished tasks in order, then the current one.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    if CURRENT not in broadcast:
        raise SchemaMismatch("the broadcast lacks the part 'current'.", action=_FETCH)
    current = _read(broadcast[CURRENT])
    needed = [task_part(t) for t in range(current.index)]
    lacking = [name for name in needed if name not in broadcast]
    if lacking:
        raise SchemaMismatch(f"the broadcast lacks the part {lacking[0]!r}.", action=_FETCH)
    return (*(_read(broadcast[name]) for name in needed), current)


_FETCH = "Fetch all parts of the state that the round starts from."


def _read(payload: Payload) -> TaskPart:
    index = payload.meta["task"]
    assert isinstance(index, int)
    proto = payload.f32("proto")
    return TaskPart(
        index=index,
        lora={name: payload.f32(name) for name in payload.tensors if name.startswith("lora.")},
        proto=proto,
        classes=payload.i64("classes"),
        seen=payload.i64("seen").astype(bool),
        future=payload.f32("future") if "future" in payload.tensors else proto[:0],
    )


def statistics_payload(
    classes: tuple[int, ...], means: NDArray[np.float64], counts: NDArray[np.int64], least: int
) -> dict[str, NDArray[np.generic]]:
    """Return the tensors by which a client describes its classes.

    Args:
        classes: the C class ids of the task.
        means: (C, d).
        counts: (C,).
        least: classes with fewer images keep their mean at home.
    """
    owned = counts >= least
    ids = np.asarray(classes, dtype=np.int64)
    return {
        "mean": means[owned].astype(np.float32),
        "owned": ids[owned],
        "classes": ids,
        "count": counts.astype(np.int64),
        "n": counts.sum(dtype=np.int64).reshape(1),
    }


def check_upload(least: int, payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which an upload contradicts itself or the task."""
    classes = payload.i64("classes").tolist()
    counts = payload.i64("count").tolist()
    owned = payload.i64("owned").tolist()
    faults = []
    if classes != list(task.classes):
        faults.append(f"'classes': expected {list(task.classes)}, got {classes[:20]}")
    if any(count < 0 for count in counts):
        faults.append("'count' holds a negative number")
    expected = [c for c, count in zip(task.classes, counts, strict=False) if count >= least]
    if owned != expected:
        faults.append(
            f"'owned': expected the classes with at least {least} images, {expected}, "
            f"got {owned[:20]}"
        )
    total = payload.i64("n").sum()
    if total != sum(counts):
        faults.append(f"'n': expected {sum(counts)}, the sum of 'count', got {total}")
    return faults
