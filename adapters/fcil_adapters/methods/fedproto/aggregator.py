"""FedProto's server half: averages, and class means over all clients' images (torch)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcil_adapters.contract import Context, Part, Payload, State, Updates
from fcil_adapters.methods.fedproto.parts import proto_part
from fcil_adapters.numerics.class_reports import federated_means
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.lora.halves import LoraAggregator
from fcil_adapters.toolkit.prototypes.rows import ROW_TENSORS, PrototypeRows


class Aggregator(LoraAggregator):
    """State of `lora.server`, with ``proto.<t>...`` of every task: rows, classes, seen or not."""

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes have no prototypes yet."""
        classes = ctx.task.classes
        none = np.zeros((len(classes), ctx.backbone_info.dim), dtype=np.float32)
        rows = PrototypeRows.first(none, classes)
        return _with(super().open_task(ctx, state), ctx.task.index, rows)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the model; prototypes are the means of this round, or stay (Tan, Eq. 6)."""
        t, classes = ctx.task.index, ctx.task.classes
        means, counts = federated_means(updates, classes, ctx.max_weight_share, mean="proto")
        before, now = _of(state, t), counts > 0
        proto = np.where(now[:, None], means, before.proto).astype(np.float32)
        rows = replace(before, proto=proto, seen=before.seen | now)
        return _with(super().aggregate(ctx, state, updates), t, rows)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts, and each task's prototypes."""
        tasks = range(current_task(state) + 1)
        protos = (Part(proto_part(t), Payload(_of(state, t).tensors)) for t in tasks)
        return (*super().broadcast(ctx, state), *protos)


def _of(state: State, task: int) -> PrototypeRows:
    return PrototypeRows.of({n: state.tensors[f"proto.{task}.{n}"] for n in ROW_TENSORS})


def _with(state: State, task: int, rows: PrototypeRows) -> State:
    named = {f"proto.{task}.{name}": array for name, array in rows.tensors.items()}
    return State({**state.tensors, **named}, state.meta)
