"""Tensor names of HePCo's payloads, and what clients may say about their classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.class_reports import count_faults
from fcil_adapters.contract import TaskInfo
from fcil_adapters.tasks import CURRENT, current_task, find_part, task_part
from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

HEAD = ("head.weight", "head.bias")
POOLS = "pools"  # the part with prompts and keys, which a task's opening leaves as they are


def pool_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return ``prompt.<block>`` and ``key.<block>`` for every pool, in a fixed order."""
    return tuple(f"{kind}.{b}" for b in sorted(blocks) for kind in ("prompt", "key"))


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
    """Read a broadcast: the head, the pools, and the classes of finished tasks.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    model, pools = find_part(broadcast, CURRENT), find_part(broadcast, POOLS)
    finished = [find_part(broadcast, task_part(t)) for t in range(current_task(model))]
    tasks = [*finished, model]
    return GlobalModel(
        pools={n: pools.f32(n) for n in pools.tensors},
        weight=model.f32("head.weight"),
        bias=model.f32("head.bias"),
        classes=np.concatenate([part.i64("classes") for part in tasks]),
        seen=np.concatenate([part.i64("seen") for part in tasks]).astype(bool),
        current=len(model.i64("classes")),
    )


def upload(
    trained: Mapping[str, Array], classes: tuple[int, ...], counts: I64, *, send_counts: bool
) -> Payload:
    """Return what a client sends: pools and head rows, and its image counts (c,) or their sum."""
    facts: dict[str, Array] = {
        "classes": np.asarray(classes, dtype=np.int64),
        "n": counts.sum(dtype=np.int64).reshape(1),
    }
    if send_counts:
        facts["count"] = counts
    return Payload({**trained, **facts})


def image_counts(payload: Payload) -> F64:
    """Return a client's images of each class (c,), all alike if it tells only how many in all."""
    if "count" in payload.tensors:
        return payload.i64("count").astype(np.float64)
    c = len(payload.tensors["classes"])
    return np.full(c, payload.i64("n").sum() / c)


def check_upload(payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which an upload contradicts itself or the task."""
    if "count" in payload.tensors:
        return count_faults(payload, task)
    classes = payload.i64("classes").tolist()
    expected = list(task.classes)
    return [] if classes == expected else [f"'classes': expected {expected}, got {classes[:20]}"]
