"""Tensor names of HePCo's payloads, and what clients may say about their classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

CURRENT = "current"
HEAD = ("head.weight", "head.bias")


def pool_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return ``prompt.<block>`` and ``key.<block>`` for every pool, in a fixed order."""
    return tuple(f"{kind}.{b}" for b in sorted(blocks) for kind in ("prompt", "key"))


def task_part(task: int) -> str:
    """Return the name of the part that tells of a finished task's classes."""
    return f"task/{task}"


@dataclass(frozen=True)
class GlobalModel:
    """What a broadcast holds.

    Attributes:
        pools: `pool_names` -> prompts (M, L, d) and keys (M, d).
        weight: (C, d), head rows of all classes up to the current task, in order of tasks.
        bias: (C,).
        classes: (C,) global ids.
        seen: (C,), whether anybody ever had an image of the class.
        current: c, how many of the last rows belong to the current task.
    """

    pools: Mapping[str, F32]
    weight: F32
    bias: F32
    classes: I64
    seen: NDArray[np.bool_]
    current: int


def read_parts(broadcast: Mapping[str, Payload]) -> GlobalModel:
    """Read a broadcast: the model, and the classes of finished tasks.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    if CURRENT not in broadcast:
        raise SchemaMismatch("the broadcast lacks the part 'current'.", action=_FETCH)
    model = broadcast[CURRENT]
    index = model.meta["task"]
    assert isinstance(index, int)
    needed = [task_part(t) for t in range(index)]
    lacking = [name for name in needed if name not in broadcast]
    if lacking:
        raise SchemaMismatch(f"the broadcast lacks the part {lacking[0]!r}.", action=_FETCH)
    tasks = [*(broadcast[name] for name in needed), model]
    return GlobalModel(
        pools={n: model.f32(n) for n in model.tensors if n.startswith(("prompt.", "key."))},
        weight=model.f32("head.weight"),
        bias=model.f32("head.bias"),
        classes=np.concatenate([part.i64("classes") for part in tasks]),
        seen=np.concatenate([part.i64("seen") for part in tasks]).astype(bool),
        current=len(model.i64("classes")),
    )


_FETCH = "Fetch all parts of the state that the round starts from."


def upload(trained: Mapping[str, Array], classes: tuple[int, ...], counts: I64) -> Payload:
    """Return what a client sends: its pools and head rows, and its image counts (c,)."""
    facts = {
        "classes": np.asarray(classes, dtype=np.int64),
        "count": counts,
        "n": counts.sum(dtype=np.int64).reshape(1),
    }
    return Payload({**trained, **facts})


def check_upload(payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which an upload contradicts itself or the task."""
    classes = payload.i64("classes").tolist()
    counts = payload.i64("count").tolist()
    faults = []
    if classes != list(task.classes):
        faults.append(f"'classes': expected {list(task.classes)}, got {classes[:20]}")
    if any(count < 0 for count in counts):
        faults.append("'count' holds a negative number")
    total = payload.i64("n").sum()
    if total != sum(counts):
        faults.append(f"'n': expected {sum(counts)}, the sum of 'count', got {total}")
    return faults
