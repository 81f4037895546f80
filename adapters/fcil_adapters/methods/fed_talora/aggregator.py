"""Fed-TaLoRA's server half: average LoRA and head, and keep what the averages lose (torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.arrays import sample_weights
from fcil_adapters.averaging import average
from fcil_adapters.contract import Context, Part, State, Update, Updates
from fcil_adapters.lora_tensors import draw_lora
from fcil_adapters.methods.fed_talora.head import average_head, first_rows, lone_row
from fcil_adapters.methods.fed_talora.history import extended, parts_of, position
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import (
    FIXED,
    HEAD_TENSORS,
    HeadRows,
    factor_names,
    places,
    trained_names,
)
from fcil_adapters.methods.fed_talora.residuals import Residual
from fcil_adapters.tasks import CURRENT, current_task, task_part
from fcil_protocol.ids import ClientId
from fcil_protocol.payload import Array, Payload
from fcil_protocol.schema import Kind

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_LORA = 1  # purpose of the random stream


class Aggregator:
    """The state holds ``lora...``, head rows ``task.<t>...`` and the residuals (`history`).

    With ``head_loss = all`` the rows of all seen classes stand together in ``task.all...``.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: nothing yet."""
        del ctx
        return State({}, {"task": -1, "version": 0, "base": 0})

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the task's head rows, and at first the LoRA; else everything goes on as it is."""
        h: FedTaloraHparams = ctx.hparams
        task = ctx.task
        assert task.index == current_task(state) + 1, "tasks open one after the other"
        tensors = dict(state.tensors)
        if task.index == 0:
            rng = ctx.rng(_LORA)
            drawn = draw_lora(factor_names(h), h.rank, ctx.backbone_info, rng, h.init_a)
            tensors.update(_committed(ctx, drawn))
        rows = first_rows(ctx)
        if h.head_loss == "all" and task.index > 0:
            rows = HeadRows.joined((_rows(h, state, task.index - 1), rows))
        opened = State(tensors, {**state.meta, "task": task.index})
        return _with_rows(ctx, opened, rows)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average LoRA and head; add what the mean of products has over that (Eq. 4, 5, 9).

        Updates that were trained on another base are left out; without any other nothing
        changes.
        """
        h: FedTaloraHparams = ctx.hparams
        facts = _Facts.of(updates, position(state)[0], len(ctx.task.classes))
        if not facts.fresh.any():
            return state
        if not facts.fresh.all():
            updates = _Fresh(updates, facts.fresh)
            facts = facts.of_fresh()
        current = current_task(state)
        rows = _rows(h, state, current)
        past = tuple(_rows(h, state, t) for t in range(current) if h.head_loss != "all")
        if h.single_column(ctx.task):
            return _with_rows(ctx, state, lone_row(facts.means, facts.counts, rows, past, ctx))
        counted = updates.samples if h.weights == "samples" else (1,) * len(updates)
        weights = sample_weights(counted, ctx.max_weight_share)  # (K,)
        names = (*trained_names(h), *HEAD_TENSORS[:2])
        mean = average(ctx, updates, names, weights, {**state.tensors, **_named(rows)})
        lora = _committed(ctx, {name: mean[name] for name in trained_names(h)})
        rows = average_head(updates, mean, facts.counts, rows, ctx)
        after = _with_rows(ctx, State({**state.tensors, **lora}, state.meta), rows)
        if not h.corrects or len(updates) == 1:
            return after
        residual = Residual(updates, weights, lora, places(h), ctx.device)
        return extended(after, residual, h, ctx.backbone_info, ctx.device)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the current LoRA and rows, finished tasks' rows, and the residuals."""
        h: FedTaloraHparams = ctx.hparams
        current = current_task(state)
        if current < 0:
            return ()
        version, base = position(state)
        meta = {"task": current, "version": version, "base": base}
        tensors = {name: state.tensors[name] for name in trained_names(h)}
        tensors |= _named(_rows(h, state, current))
        parts = [Part(CURRENT, Payload(tensors, meta)), *parts_of(state)]
        if h.freeze_a:
            fixed = {name: state.tensors[name] for name in factor_names(h, of="A")}
            parts.append(Part(FIXED, Payload(fixed)))
        if h.head_loss != "all":
            parts += [
                Part(task_part(t), Payload(_named(_rows(h, state, t)), {"task": t}))
                for t in range(current)
            ]
        return tuple(parts)


@dataclass(frozen=True)
class _Facts:
    """What the updates say besides their weights.

    Attributes:
        fresh: (K,), whether each was trained on the state's base.
        counts: (K, c), images of each of the task's classes.
        means: (K, d), mean features; no columns where none were sent. A client that kept its
            mean at home has a zero row and no counts.
    """

    fresh: NDArray[np.bool_]
    counts: I64
    means: F32

    @classmethod
    def of(cls, updates: Updates, version: int, c: int) -> _Facts:
        fresh, counts, means = [], [], []
        width = 0
        for update in updates:
            sent = update.payload
            fresh.append(sent.meta["version"] == version)
            counts.append(sent.i64("count"))
            mean = sent.f32("mean")[0] if "mean" in sent.tensors else None
            means.append(mean)
            width = width if mean is None else len(mean)
        stacked = np.stack([np.zeros(width, np.float32) if m is None else m for m in means])
        told = np.array([m is not None for m in means])
        kept = np.stack(counts).reshape(-1, c)
        if width:
            kept = np.where(told[:, None], kept, 0)
        return cls(np.array(fresh), kept, stacked)

    def of_fresh(self) -> _Facts:
        return _Facts(self.fresh[self.fresh], self.counts[self.fresh], self.means[self.fresh])


@dataclass(frozen=True)
class _Fresh:
    """The updates that were trained on the state's base (`contract.Updates`)."""

    updates: Updates
    fresh: NDArray[np.bool_]

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(c for c, ok in zip(self.updates.clients, self.fresh, strict=True) if ok)

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(n for n, ok in zip(self.updates.samples, self.fresh, strict=True) if ok)

    def __len__(self) -> int:
        return int(self.fresh.sum())

    def __iter__(self) -> Iterator[Update]:
        return (u for u, ok in zip(self.updates, self.fresh, strict=True) if ok)


def _prefix(h: FedTaloraHparams, task: int) -> str:
    return "task.all." if h.head_loss == "all" else f"task.{task}."


def _rows(h: FedTaloraHparams, state: State, task: int) -> HeadRows:
    prefix = _prefix(h, task)
    return HeadRows.of({name: state.tensors[f"{prefix}{name}"] for name in HEAD_TENSORS})


def _named(rows: HeadRows) -> Mapping[str, Array]:
    values = (rows.weight, rows.bias, rows.classes, rows.seen.astype(np.int64))
    return dict(zip(HEAD_TENSORS, values, strict=True))


def _committed(ctx: Context, lora: Mapping[str, F32]) -> dict[str, F32]:
    return dict(lora) if ctx.hparams.corrects else ctx.forms.commit_named(lora)


def _with_rows(ctx: Context, state: State, rows: HeadRows) -> State:
    prefix = _prefix(ctx.hparams, current_task(state))
    rows = replace(
        rows,
        weight=ctx.forms.commit(Kind.HEAD, rows.weight),
        bias=ctx.forms.commit(Kind.HEAD, rows.bias),
    )
    named = {f"{prefix}{name}": array for name, array in _named(rows).items()}
    return State({**state.tensors, **named}, state.meta)
