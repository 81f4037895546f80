"""PILoRA's server half: average LoRA, re-weight prototypes, keep finished tasks (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.arrays import sample_weights, weighted_mean
from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.methods.pilora.parts import CURRENT, lora_names, task_part
from fcil_adapters.reweighting import reweight
from fcil_adapters.statistics import class_positions, merge_means
from fcil_protocol.errors import ConfigError
from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_TASK_TENSORS = ("proto", "classes", "seen")
_TABLE = "table"  # 0.1 N(0, I) for every class of the run, drawn once (candidates = all)
_SPREAD = 0.1  # standard deviation of random prototypes
_LORA, _PROTOTYPES, _FUTURE = 1, 2, 3  # purposes of the random streams


class Aggregator:
    """The state holds every task: ``task.<t>.lora...``, ``.proto``, ``.classes``, ``.seen``."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        h: PiloraHparams = ctx.hparams
        if h.candidates != "all":
            return State({}, {"task": -1})
        assert h.total_classes is not None
        return State({_TABLE: _draw_prototypes(ctx, h.total_classes, _FUTURE)}, {"task": -1})

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw A (Kaiming-uniform), B = 0 and random prototypes.

        Raises:
            ConfigError: the run has more classes than ``total_classes``.
        """
        task = ctx.task
        assert task.index == _current(state) + 1, "tasks open one after the other"
        tensors: dict[str, Array] = {
            **_draw_lora(ctx),
            "proto": _first_prototypes(ctx, state),
            "classes": np.asarray(task.classes, dtype=np.int64),
            "seen": np.zeros(len(task.classes), dtype=np.int64),
        }
        return _with_task(state, task.index, tensors)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine class means (``prepare``) or LoRA and prototypes (``train``)."""
        reports = _Reports.of(updates, ctx.task.classes, with_proto=ctx.kind == "train")
        proto = _task(state, ctx.task.index, "proto")  # (c, d)
        if ctx.kind == "prepare":
            means, totals = merge_means(reports.means, reports.counts, ctx.max_weight_share)
            merged = np.where((totals > 0)[:, None], means, proto).astype(np.float32)
            return _with_task(
                state, ctx.task.index, {"proto": merged, "seen": _seen(ctx, state, totals > 0)}
            )
        h: PiloraHparams = ctx.hparams
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
        tensors: dict[str, Array] = {
            **weighted_mean(updates, lora_names(h.blocks), weights),
            "proto": to_numpy(combined),
            "seen": _seen(ctx, state, owned),
        }
        return _with_task(state, ctx.task.index, tensors)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current task and, each once and unchanged, all finished tasks."""
        current = _current(state)
        names = (*lora_names(ctx.hparams.blocks), *_TASK_TENSORS)
        parts = []
        for t in range(current + 1):
            tensors: dict[str, Array] = {name: _task(state, t, name) for name in names}
            if t == current and _TABLE in state.tensors:
                tensors["future"] = state.tensors[_TABLE][_class_count(state) :]
            parts.append(Part(CURRENT if t == current else task_part(t), _tagged(tensors, t)))
        return tuple(parts)


@dataclass(frozen=True)
class _Reports:
    """The clients' prototypes and class means, stacked.

    Attributes:
        protos: (K, c, d).
        means: (K, c, d), zero where the client sent none.
        counts: (K, c), images behind each mean; zero where the client sent none.
    """

    protos: F32
    means: F32
    counts: I64

    @classmethod
    def of(cls, updates: Updates, classes: tuple[int, ...], *, with_proto: bool) -> _Reports:
        protos, means, counts = [], [], []
        for update in updates:
            sent = update.payload
            rows = class_positions(sent.i64("owned"), classes)
            mean = np.zeros((len(classes), sent.tensors["mean"].shape[1]), dtype=np.float32)
            mean[rows] = sent.f32("mean")
            count = np.zeros(len(classes), dtype=np.int64)
            count[rows] = sent.i64("count")[rows]
            means.append(mean)
            counts.append(count)
            protos.append(sent.f32("proto") if with_proto else mean)
        return cls(np.stack(protos), np.stack(means), np.stack(counts))


def _draw_lora(ctx: Context) -> dict[str, F32]:
    """Draw A from U(-1/sqrt(d), 1/sqrt(d)), which is Kaiming-uniform with a = sqrt(5); B = 0."""
    h: PiloraHparams = ctx.hparams
    d = ctx.backbone_info.dim
    rng = ctx.rng(_LORA)
    bound = 1 / np.sqrt(d)
    return {
        name: rng.uniform(-bound, bound, (h.rank, d)).astype(np.float32)
        if name.endswith("A")
        else np.zeros((d, h.rank), dtype=np.float32)
        for name in lora_names(h.blocks)
    }


def _draw_prototypes(ctx: Context, rows: int, purpose: int) -> F32:
    shape = (rows, ctx.backbone_info.dim)
    return (_SPREAD * ctx.rng(purpose).standard_normal(shape)).astype(np.float32)


def _first_prototypes(ctx: Context, state: State) -> F32:
    """Return (c, d): fresh draws, or the rows that were the fixed negatives of these classes."""
    c = len(ctx.task.classes)
    if _TABLE not in state.tensors:
        return _draw_prototypes(ctx, c, _PROTOTYPES)
    table, first = state.f32(_TABLE), _class_count(state)
    if first + c > len(table):
        raise ConfigError(
            f"total_classes = {len(table)}, but task {ctx.task.index} makes {first + c} classes.",
            action="Start a run with a larger total_classes, or with candidates = 'seen'.",
        )
    return table[first : first + c]


def _current(state: State) -> int:
    task = state.meta["task"]
    assert isinstance(task, int)
    return task


def _class_count(state: State) -> int:
    """Return how many classes all tasks up to the current one have."""
    return sum(len(_task(state, t, "classes")) for t in range(_current(state) + 1))


def _task(state: State, task: int, name: str) -> Array:
    return state.tensors[f"task.{task}.{name}"]


def _seen(ctx: Context, state: State, now: NDArray[np.bool_]) -> I64:
    before = _task(state, ctx.task.index, "seen").astype(bool)
    return (before | now).astype(np.int64)


def _tagged(tensors: Mapping[str, Array], task: int) -> Payload:
    return Payload(tensors, {"task": task})


def _with_task(state: State, task: int, tensors: Mapping[str, Array]) -> State:
    named = {f"task.{task}.{name}": array for name, array in tensors.items()}
    return _tagged({**state.tensors, **named}, task)
