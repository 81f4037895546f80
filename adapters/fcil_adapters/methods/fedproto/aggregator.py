"""FedProto's server half: averages, and class means over all clients' images (torch)."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Array, Context, Part, Payload, State, Updates
from fcil_adapters.methods.fedproto.parts import NAMES, proto_part
from fcil_adapters.numerics.class_reports import federated_means
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.lora.halves import LoraAggregator


class Aggregator(LoraAggregator):
    """State of `lora.server`, with ``proto.<t>...`` of every task: rows, classes, seen or not."""

    def open_task(self, ctx: Context, state: State) -> State:
        """Add a task whose classes have no prototypes yet."""
        c = len(ctx.task.classes)
        fresh: dict[str, Array] = {
            "proto": np.zeros((c, ctx.backbone_info.dim), dtype=np.float32),
            "classes": np.asarray(ctx.task.classes, dtype=np.int64),
            "seen": np.zeros(c, dtype=np.int64),
        }
        return _with(super().open_task(ctx, state), ctx.task.index, fresh)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the model; prototypes are the means of this round, or stay (Tan, Eq. 6)."""
        t, classes = ctx.task.index, ctx.task.classes
        means, counts = federated_means(updates, classes, ctx.max_weight_share, mean="proto")
        before = _of(state, t)
        proto = np.where((counts > 0)[:, None], means, before["proto"]).astype(np.float32)
        seen = np.maximum(before["seen"], counts > 0)
        after = super().aggregate(ctx, state, updates)
        return _with(after, t, {**before, "proto": proto, "seen": seen})

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts, and each task's prototypes."""
        tasks = range(current_task(state) + 1)
        protos = (Part(proto_part(t), Payload(_of(state, t))) for t in tasks)
        return (*super().broadcast(ctx, state), *protos)


def _of(state: State, task: int) -> dict[str, Array]:
    return {name: state.tensors[f"proto.{task}.{name}"] for name in NAMES}


def _with(state: State, task: int, tensors: dict[str, Array]) -> State:
    named = {f"proto.{task}.{name}": array for name, array in tensors.items()}
    return State({**state.tensors, **named}, state.meta)
