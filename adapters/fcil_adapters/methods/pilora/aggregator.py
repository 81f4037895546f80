"""PILoRA's server half: average LoRA, re-weight prototypes, keep finished tasks (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Kind, Part, State, Updates
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import (
    CURRENT,
    current_task,
    of_task,
    tagged,
    task_part,
    with_task,
)
from fcil_adapters.toolkit.lora.tensors import draw_lora, lora_names, lora_places
from fcil_adapters.toolkit.prototypes.rows import ROW_TENSORS, PrototypeRows, draw_prototypes
from fcil_adapters.toolkit.prototypes.server import combine, committed, start_at_means
from fcil_protocol.errors import ConfigError

F32 = NDArray[np.float32]

_TABLE = "table"  # 0.1 N(0, I) for every class of the run, drawn once (candidates = all)
_LORA, _PROTOTYPES, _FUTURE = 1, 2, 3  # purposes of the random streams


class Aggregator:
    """The state holds every task: ``task.<t>.lora...``, ``.proto``, ``.classes``, ``.seen``."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        h: PiloraHparams = ctx.hparams
        if h.candidates != "all":
            return tagged({}, -1)
        assert h.total_classes is not None
        table = draw_prototypes(h.total_classes, ctx.backbone_info.dim, ctx.rng(_FUTURE))
        return tagged({_TABLE: ctx.forms.commit(Kind.PROTOTYPE, table)}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw its A's, B = 0 and random prototypes.

        Raises:
            ConfigError: the run has more classes than ``total_classes``.
        """
        h: PiloraHparams = ctx.hparams
        task = ctx.task
        assert task.index == current_task(state) + 1, "tasks open one after the other"
        lora = draw_lora(_names(h), h.rank, ctx.backbone_info, ctx.rng(_LORA), h.init_a)
        rows = PrototypeRows.first(_first_prototypes(ctx, state), task.classes)
        opened = tagged(state.tensors, task.index)
        return _with_task(ctx, opened, rows, lora)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine class means (``prepare``) or LoRA and prototypes (``train``)."""
        h: PiloraHparams = ctx.hparams
        t = ctx.task.index
        rows = PrototypeRows.of(of_task(state, t, ROW_TENSORS))
        if ctx.kind == "prepare":
            return _with_task(ctx, state, start_at_means(ctx, updates, rows))
        weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
        start = of_task(state, t, _names(h))
        lora = average(ctx, updates, _names(h), weights, start)
        rows = combine(ctx, updates, rows, weights, h.reweight)
        return _with_task(ctx, state, rows, lora)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the index of the current task, and all tasks, of which only the current changes.

        Its part keeps its name after the task ends, so it is not sent again then.
        """
        current = current_task(state)
        if current < 0:
            return ()
        future = (
            {"future": state.tensors[_TABLE][_class_count(state) :]}
            if _TABLE in state.tensors
            else {}
        )
        names = (*_names(ctx.hparams), *ROW_TENSORS)
        return (
            Part(CURRENT, tagged(future, current)),
            *(Part(task_part(t), tagged(of_task(state, t, names), t)) for t in range(current + 1)),
        )


def _with_task(
    ctx: Context, state: State, rows: PrototypeRows, lora: Mapping[str, F32] | None = None
) -> State:
    lora = ctx.forms.commit_named(lora or {})
    return with_task(state, ctx.task.index, {**lora, **committed(ctx, rows).tensors})


def _names(h: PiloraHparams) -> tuple[str, ...]:
    return lora_names(lora_places(h.blocks))


def _first_prototypes(ctx: Context, state: State) -> F32:
    """Return (c, d): fresh draws, or the former fixed negatives of these classes."""
    c = len(ctx.task.classes)
    if _TABLE not in state.tensors:
        return draw_prototypes(c, ctx.backbone_info.dim, ctx.rng(_PROTOTYPES))
    table, first = state.f32(_TABLE), _class_count(state)
    if first + c > len(table):
        raise ConfigError(
            f"total_classes = {len(table)}, but task {ctx.task.index} makes {first + c} classes.",
            action="Start a run with a larger total_classes, or with candidates = 'seen'.",
        )
    return table[first : first + c]


def _class_count(state: State) -> int:
    """Return the number of classes of all tasks up to the current one."""
    tasks = range(current_task(state) + 1)
    return sum(len(of_task(state, t, ["classes"])["classes"]) for t in tasks)
