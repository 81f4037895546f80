"""PLoRA's server half: average the LoRA, re-weight prototypes, keep the teacher (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.arrays import sample_weights, weighted_mean
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.class_reports import ClassReports
from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.methods.plora.options import PloraHparams
from fcil_adapters.methods.plora.parts import (
    CURRENT,
    ROW_TENSORS,
    lora_names,
    task_part,
    teacher_part,
)
from fcil_adapters.reweighting import reweight
from fcil_adapters.statistics import merge_means
from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]

_SPREAD = 0.1  # standard deviation of random prototypes
_LORA, _PROTOTYPES = 1, 2  # purposes of the random streams


class Aggregator:
    """The state holds ``lora...``, ``teacher.lora...`` and ``task.<t>.proto|classes|seen``."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: nothing yet."""
        del ctx
        return State({}, {"task": -1})

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw prototypes; at first the LoRA as well (A Kaiming-uniform, B = 0).

        Later the LoRA goes on as it is, and a copy of it becomes the teacher.
        """
        h: PloraHparams = ctx.hparams
        task = ctx.task
        assert task.index == _current(state) + 1, "tasks open one after the other"
        tensors = dict(state.tensors)
        if task.index == 0:
            tensors.update(_draw_lora(ctx))
        elif h.gamma_kd > 0:
            tensors.update({f"teacher.{n}": state.tensors[n] for n in lora_names(h.blocks)})
        rows: dict[str, Array] = {
            "proto": _draw_prototypes(ctx),
            "classes": np.asarray(task.classes, dtype=np.int64),
            "seen": np.zeros(len(task.classes), dtype=np.int64),
        }
        return _with_rows(State(tensors, {"task": task.index}), task.index, rows)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine class means (``prepare``) or LoRA and prototypes (``train``)."""
        h: PloraHparams = ctx.hparams
        t = ctx.task.index
        reports = ClassReports.of(updates, ctx.task.classes, with_proto=ctx.kind == "train")
        proto = _row(state, t, "proto")  # (c, d)
        seen = _row(state, t, "seen").astype(bool)  # (c,)
        if ctx.kind == "prepare":
            means, totals = merge_means(reports.means, reports.counts, ctx.max_weight_share)
            merged = np.where((totals > 0)[:, None], means, proto).astype(np.float32)
            rows: dict[str, Array] = {"proto": merged, "seen": _flags(seen | (totals > 0))}
            return _with_rows(state, t, rows)
        weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
        combined, _ = reweight(
            to_torch(reports.protos, ctx.device),
            to_torch(reports.means, ctx.device),
            to_torch(reports.counts, ctx.device),
            to_torch(proto, ctx.device),
            to_torch(weights, ctx.device),
            options=h.reweight,
        )
        owned: NDArray[np.bool_] = np.any(reports.counts >= h.reweight.min_count, axis=0)  # (c,)
        lora = weighted_mean(updates, lora_names(h.blocks), weights)
        rows = {"proto": to_numpy(combined), "seen": _flags(seen | owned)}
        return _with_rows(State({**state.tensors, **lora}, state.meta), t, rows)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current task and LoRA, the teacher, and all finished tasks' prototypes."""
        current = _current(state)
        if current < 0:
            return ()
        names = lora_names(ctx.hparams.blocks)
        parts = [Part(task_part(t), _tagged(_rows(state, t), t)) for t in range(current)]
        teacher = {
            n: state.tensors[f"teacher.{n}"] for n in names if f"teacher.{n}" in state.tensors
        }
        if teacher:
            parts.append(Part(teacher_part(current - 1), _tagged(teacher, current - 1)))
        tensors = {**{n: state.tensors[n] for n in names}, **_rows(state, current)}
        parts.append(Part(CURRENT, _tagged(tensors, current)))
        return tuple(parts)


def _draw_lora(ctx: Context) -> dict[str, F32]:
    """Draw A from U(-1/sqrt(d), 1/sqrt(d)), which is Kaiming-uniform with a = sqrt(5); B = 0."""
    h: PloraHparams = ctx.hparams
    d = ctx.backbone_info.dim
    rng = ctx.rng(_LORA)
    bound = 1 / np.sqrt(d)
    return {
        name: rng.uniform(-bound, bound, (h.rank, d)).astype(np.float32)
        if name.endswith("A")
        else np.zeros((d, h.rank), dtype=np.float32)
        for name in lora_names(h.blocks)
    }


def _draw_prototypes(ctx: Context) -> F32:
    shape = (len(ctx.task.classes), ctx.backbone_info.dim)
    return (_SPREAD * ctx.rng(_PROTOTYPES).standard_normal(shape)).astype(np.float32)


def _current(state: State) -> int:
    task = state.meta["task"]
    assert isinstance(task, int)
    return task


def _row(state: State, task: int, name: str) -> Array:
    return state.tensors[f"task.{task}.{name}"]


def _rows(state: State, task: int) -> dict[str, Array]:
    return {name: _row(state, task, name) for name in ROW_TENSORS}


def _flags(values: NDArray[np.bool_]) -> NDArray[np.int64]:
    return values.astype(np.int64)


def _tagged(tensors: Mapping[str, Array], task: int) -> Payload:
    return Payload(tensors, {"task": task})


def _with_rows(state: State, task: int, rows: Mapping[str, Array]) -> State:
    named = {f"task.{task}.{name}": array for name, array in rows.items()}
    return State({**state.tensors, **named}, state.meta)
