"""The server's half of LoRA and a linear head: open tasks, average, broadcast (torch; `manifest`).

The state holds ``lora...``, head rows ``task.<t>...`` (``task.all...`` where they stay together)
and, for methods with a teacher, ``teacher...``. An aggregator of this family::

    def init(self, ctx): return first_state()
    def open_task(self, ctx, state): return open_task(ctx, state)
    def aggregate(self, ctx, state, updates): return average_round(ctx, state, updates)
    def broadcast(self, ctx, state): return parts_of(ctx, state)

A method keeps further tensors next to these in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import CURRENT, current_task, tagged, task_part
from fcil_adapters.toolkit.heads.rows import F32, HEAD, HEAD_TENSORS, I64, HeadRows
from fcil_adapters.toolkit.heads.server import averaged_rows, first_rows, lone_row, mean_by_class
from fcil_adapters.toolkit.lora.manifest import (
    FIXED,
    TEACHER,
    factor_names,
    fixed_names,
    sent_names,
    trained_names,
)
from fcil_adapters.toolkit.lora.options import LoraHparams
from fcil_adapters.toolkit.lora.tensors import draw_lora
from fcil_protocol.payloads.payload import Array, Payload

_LORA = 1  # purpose of the random stream

F64 = NDArray[np.float64]
# As `averaging.average`: context, updates, names, weights (K,), tensors at the start of the round.
Combine = Callable[[Context, Updates, Sequence[str], F64, Mapping[str, Array]], dict[str, F32]]


def first_state(**meta: int) -> State:
    """Return the empty state before the first task."""
    return State({}, {"task": -1, **meta})


def open_task(ctx: Context, state: State) -> State:
    """Draw the task's head rows, and the LoRA at first or for each task; the rest stays."""
    h: LoraHparams = ctx.hparams
    task = ctx.task
    assert task.index == current_task(state) + 1, "tasks open one after the other"
    tensors = dict(state.tensors)
    if task.index > 0 and h.keeps_teacher:
        tensors.update(_teacher(h, state))
    if task.index == 0 or h.fresh_lora:
        rng = ctx.rng(_LORA)
        drawn = draw_lora(factor_names(h), h.rank, ctx.backbone_info, rng, h.init_a)
        tensors.update(_committed(ctx, drawn))
    rows = first_rows(ctx)
    if h.past_rows == "together" and task.index > 0:
        rows = HeadRows.joined((rows_of(h, state, task.index - 1), rows))
    opened = State(tensors, {**state.meta, "task": task.index})
    return with_rows(ctx, opened, rows)


@dataclass(frozen=True)
class LoraReports:
    """Facts of the updates besides the averaged tensors.

    Attributes:
        metas: metadata of each of the K uploads.
        counts: (K, c), images of each of the task's classes.
        means: (K, d), mean features of a lone class; no columns if none were sent. A client that
            kept its mean has a zero row and no counts.
    """

    metas: tuple[Mapping[str, Any], ...]
    counts: I64
    means: F32

    @classmethod
    def of(cls, updates: Updates, c: int) -> LoraReports:
        """Read all updates of a task of c classes, one open at a time."""
        metas, counts, means = [], [], []
        width = 0
        for update in updates:
            sent = update.payload
            metas.append(sent.meta)
            counts.append(sent.i64("count").copy())
            mean = sent.f32("mean")[0].copy() if "mean" in sent.tensors else None
            means.append(mean)
            width = width if mean is None else len(mean)
        stacked = np.stack([np.zeros(width, np.float32) if m is None else m for m in means])
        told = np.array([m is not None for m in means])
        kept = np.stack(counts).reshape(-1, c)
        if width:
            kept = np.where(told[:, None], kept, 0)
        return cls(tuple(metas), kept, stacked)

    def chosen(self, some: NDArray[np.bool_]) -> LoraReports:
        """Return the facts of some of the updates."""
        metas = tuple(m for m, ok in zip(self.metas, some, strict=True) if ok)
        return LoraReports(metas, self.counts[some], self.means[some])


def client_weights(ctx: Context, updates: Updates) -> F64:
    """Return the clients' capped weights (K,), which sum to 1."""
    counted = updates.samples if ctx.hparams.weights == "samples" else (1,) * len(updates)
    return sample_weights(counted, ctx.max_weight_share)


def average_round(
    ctx: Context,
    state: State,
    updates: Updates,
    told: LoraReports | None = None,
    combine: Combine = average,
    past: Sequence[HeadRows] | None = None,
) -> State:
    """Average LoRA and head rows; a lone class's row comes from its mean, and LoRA stays.

    Args:
        ctx: options, the rule of averaging and the cap.
        state: before the round.
        updates: of a `manifest.train_exchange`, at least one.
        told: their `LoraReports.of`, if the caller has read it.
        combine: the average; a method may have another.
        past: the rows that score finished tasks; None: those that were trained.
    """
    h: LoraHparams = ctx.hparams
    told = told or LoraReports.of(updates, len(ctx.task.classes))
    current = current_task(state)
    rows = rows_of(h, state, current)
    if h.single_column(ctx.task):
        if past is None:
            past = [rows_of(h, state, t) for t in range(current) if h.past_rows != "together"]
        lone = lone_row(told.means, told.counts, rows, past, ctx.max_weight_share)
        return with_rows(ctx, state, lone)
    sent = sent_names(h, ctx.round)
    start = start_of(ctx, state)
    mean = combine(ctx, updates, (*sent, *HEAD), client_weights(ctx, updates), start)
    lora = _committed(ctx, {name: mean[name] for name in sent})
    by_class = h.head_average == "rows"
    if by_class:
        mean = mean_by_class(updates, told.counts, rows, ctx.max_weight_share)
    rows = averaged_rows(mean, told.counts, rows, past=not by_class)
    return with_rows(ctx, State({**state.tensors, **lora}, state.meta), rows)


def start_of(ctx: Context, state: State) -> dict[str, Array]:
    """Return the LoRA and rows that clients train; a lone class's row is not trained."""
    h: LoraHparams = ctx.hparams
    if h.single_column(ctx.task):
        return {}
    lora = {name: state.tensors[name] for name in sent_names(h, ctx.round)}
    rows = rows_of(h, state, current_task(state)).named()
    return {**lora, **{name: rows[name] for name in HEAD}}


def parts_of(ctx: Context, state: State, meta: Mapping[str, int] | None = None) -> tuple[Part, ...]:
    """Return the parts that `lora.manifest` lists.

    Args:
        ctx: options.
        state: the state to broadcast.
        meta: further metadata of the current part.
    """
    h: LoraHparams = ctx.hparams
    current = current_task(state)
    if current < 0:
        return ()
    tensors: dict[str, Array] = {name: state.tensors[name] for name in trained_names(h)}
    tensors |= rows_of(h, state, current).named()
    parts = [Part(CURRENT, Payload(tensors, {"task": current, **(meta or {})}))]
    if h.trained_factors != "AB":
        fixed = {name: state.tensors[name] for name in fixed_names(h)}
        parts.append(Part(FIXED, Payload(fixed)))
    if h.past_rows == "frozen":
        finished = [rows_of(h, state, t).named() for t in range(current)]
        parts += [Part(task_part(t), tagged(rows, t)) for t, rows in enumerate(finished)]
    if h.keeps_teacher and current > 0:
        known = {n.removeprefix("teacher."): a for n, a in state.tensors.items() if _taught(n)}
        parts.append(Part(TEACHER, tagged(known, current - 1)))
    return tuple(parts)


def rows_of(h: LoraHparams, state: State, task: int) -> HeadRows:
    """Return a task's rows; those of all seen classes where they stay together."""
    prefix = _prefix(h, task)
    return HeadRows.of({name: state.tensors[f"{prefix}{name}"] for name in HEAD_TENSORS})


def with_rows(ctx: Context, state: State, rows: HeadRows) -> State:
    """Return the state with its task's rows replaced or added, as clients will decode them.

    Args:
        ctx: options and forms.
        state: its task is the current one.
        rows: of the task; of all seen classes where they stay together.
    """
    prefix = _prefix(ctx.hparams, current_task(state))
    named = {f"{prefix}{name}": array for name, array in rows.committed(ctx).named().items()}
    return State({**state.tensors, **named}, state.meta)


def all_rows(h: LoraHparams, state: State, tasks: Sequence[int]) -> HeadRows:
    """Return the rows of some tasks below each other."""
    return HeadRows.joined([rows_of(h, state, t) for t in tasks])


def _prefix(h: LoraHparams, task: int) -> str:
    return "task.all." if h.past_rows == "together" else f"task.{task}."


def _committed(ctx: Context, lora: Mapping[str, F32]) -> dict[str, F32]:
    return dict(lora) if ctx.hparams.exact_lora else ctx.forms.commit_named(lora)


def _taught(name: str) -> bool:
    return name.startswith("teacher.")


def _teacher(h: LoraHparams, state: State) -> dict[str, Array]:
    """Return the model at the end of the task; frozen rows are parts of their own."""
    current = current_task(state)
    taught: dict[str, Array] = {name: state.tensors[name] for name in trained_names(h)}
    if h.past_rows == "together":
        taught |= rows_of(h, state, current).named()
    elif h.past_rows == "none":
        taught |= all_rows(h, state, range(current + 1)).named()
    return {f"teacher.{name}": array for name, array in taught.items()}
