"""FedProto's parts of a broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Payload
from fcil_adapters.numerics.task_parts import of_all_tasks
from fcil_adapters.toolkit.prototypes.rows import F32, PrototypeRows, known

PROTO = "proto"  # parts with a task's prototypes


def proto_part(task: int) -> str:
    """Return the name of the part with a task's prototypes."""
    return f"{PROTO}/{task}"


def read_prototypes(
    broadcast: Mapping[str, Payload],
) -> tuple[tuple[int, ...], F32]:
    """Return the classes with prototypes, in order of tasks, and their prototypes (C, d).

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    tasks = [PrototypeRows.of(part.tensors) for part in of_all_tasks(broadcast, PROTO)]
    return known(tasks, tasks[0].proto.shape[1])
