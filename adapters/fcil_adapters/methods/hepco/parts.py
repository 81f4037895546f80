"""Tensor names of HePCo's payloads, and what clients may say about their classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Payload, TaskInfo
from fcil_adapters.numerics.class_reports import count_faults
from fcil_adapters.numerics.task_parts import find_part, finished_and_current
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.prompts.parts import POOLS, PromptModel, prompts_of

F64 = NDArray[np.float64]


def read_parts(broadcast: Mapping[str, Payload]) -> PromptModel:
    """Read a broadcast: the head, the pools, and the classes of finished tasks.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    tasks = finished_and_current(broadcast)
    flags = {n: np.concatenate([part.i64(n) for part in tasks]) for n in ("classes", "seen")}
    return PromptModel(
        prompts=(prompts_of(find_part(broadcast, POOLS)),),
        head=HeadRows.of({**tasks[-1].tensors, **flags}),
    )


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
