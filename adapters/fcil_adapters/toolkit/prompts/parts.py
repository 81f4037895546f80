"""Names and layout of prompt methods' tensors: prompts, a linear head, image counts (torch-free).

A broadcast holds the rows of the head in one part per task (``current``, ``task/0``, ...), and the
prompts in parts of their own: one for all tasks (``pools``), or one per task (``prompts/0``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fcil_adapters.contract import Part, State
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.task_parts import (
    CURRENT,
    current_task,
    finished_and_current,
    of_all_tasks,
    of_task,
    tagged,
    task_part,
)
from fcil_adapters.toolkit.heads.rows import F32, HEAD_TENSORS, I64, HeadRows
from fcil_protocol.payloads.payload import Array, Payload

POOLS = "pools"  # the part with prompts of all tasks, which the opening of a task leaves unchanged
PROMPTS = "prompts"  # kind of the parts with the prompts of one task


def pool_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return ``prompt.<block>`` and ``key.<block>`` for every pool, in a fixed order."""
    return tuple(f"{kind}.{b}" for b in sorted(blocks) for kind in ("prompt", "key"))


def component_names(blocks: Iterable[int]) -> tuple[str, ...]:
    """Return the names of `pool_names` and ``key.<block>.attention``, in a fixed order."""
    kinds = ("prompt.{}", "key.{}", "key.{}.attention")
    return tuple(kind.format(b) for b in sorted(blocks) for kind in kinds)


@dataclass(frozen=True)
class PromptModel:
    """The contents of a broadcast.

    Attributes:
        prompts: sets of prompts and keys, by name; the last one is trained. One for methods that
            have one for all tasks, else one per task, the current one last.
        head: the rows of all C classes up to the current task, in order of tasks.
    """

    prompts: tuple[Mapping[str, F32], ...]
    head: HeadRows


def prompts_of(payload: Payload) -> dict[str, F32]:
    """Return the prompts and keys of a part."""
    return {n: payload.f32(n) for n in payload.tensors if n.startswith(("prompt.", "key."))}


def read_parts(broadcast: Mapping[str, Payload]) -> PromptModel:
    """Read a broadcast: the head's rows task by task, and the prompts.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    rows = finished_and_current(broadcast)
    sets = [broadcast[POOLS]] if POOLS in broadcast else of_all_tasks(broadcast, PROMPTS)
    return PromptModel(
        prompts=tuple(prompts_of(part) for part in sets),
        head=HeadRows.joined([HeadRows.of(part.tensors) for part in rows]),
    )


def head_parts(state: State) -> tuple[Part, ...]:
    """Return the rows of each task; those of the last task still change."""
    t = current_task(state)
    task_of = state.i64("task_of")
    parts = []
    for s in range(t + 1):
        rows = task_of == s
        tensors = {name: state.tensors[name][rows] for name in HEAD_TENSORS}
        parts.append(Part(CURRENT if s == t else task_part(s), tagged(tensors, s)))
    return tuple(parts)


def pool_part(state: State, names: Iterable[str]) -> Part:
    """Return the prompts that all tasks share."""
    return Part(POOLS, Payload({name: state.tensors[name] for name in names}))


def prompt_parts(state: State, names: Iterable[str]) -> tuple[Part, ...]:
    """Return the prompts of each task; those of the last task still change."""
    wanted = tuple(names)
    return tuple(
        Part(f"{PROMPTS}/{t}", tagged(of_task(state, t, wanted), t))
        for t in range(current_task(state) + 1)
    )


def upload(trained: Mapping[str, Array], classes: Iterable[int], counts: I64) -> Payload:
    """Return a client's upload: its trained tensors, and its images of each class (c,)."""
    return Payload({**trained, **tally(classes, counts)})
