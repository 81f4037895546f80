"""PLoRA's server half: average the LoRA, re-weight prototypes, keep the teacher (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Context, Part, Payload, State, Updates
from fcil_adapters.methods.plora.options import PloraHparams
from fcil_adapters.methods.plora.parts import lora_part
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import (
    CURRENT,
    current_task,
    meta_number,
    of_task,
    tagged,
    task_part,
    with_task,
)
from fcil_adapters.toolkit.lora.tensors import draw_lora, lora_names, lora_places
from fcil_adapters.toolkit.prototypes.rows import ROW_TENSORS, PrototypeRows, draw_prototypes
from fcil_adapters.toolkit.prototypes.server import combine, committed, start_at_means

_LORA, _PROTOTYPES = 1, 2  # purposes of the random streams


class Aggregator:
    """The state holds ``lora...``, ``teacher.lora...`` and ``task.<t>.proto|classes|seen``.

    Its fields ``lora`` and ``teacher`` name the task that trained each of them last.
    """

    def init(self, ctx: Context) -> State:
        """Return the empty state before the first task."""
        del ctx
        return tagged({}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw prototypes; at first the LoRA as well (A random, B = 0).

        Later the LoRA continues unchanged, and a copy of it becomes the teacher.
        """
        h: PloraHparams = ctx.hparams
        task, info = ctx.task, ctx.backbone_info
        assert task.index == current_task(state) + 1, "tasks open one after the other"
        tensors = dict(state.tensors)
        if task.index == 0:
            drawn = draw_lora(_names(h), h.rank, info, ctx.rng(_LORA), h.init_a)
            tensors.update(ctx.forms.commit_named(drawn))
        elif h.gamma_kd > 0:
            tensors.update({f"teacher.{name}": state.tensors[name] for name in _names(h)})
        proto = draw_prototypes(len(task.classes), info.dim, ctx.rng(_PROTOTYPES))
        rows = PrototypeRows.first(proto, task.classes)
        last = meta_number(state, "lora") if task.index > 0 else 0
        opened = State(tensors, {"task": task.index, "lora": last, "teacher": last})
        return with_task(opened, task.index, committed(ctx, rows).tensors)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine class means (``prepare``) or LoRA and prototypes (``train``)."""
        h: PloraHparams = ctx.hparams
        t = ctx.task.index
        rows = PrototypeRows.of(of_task(state, t, ROW_TENSORS))
        if ctx.kind == "prepare":
            rows = committed(ctx, start_at_means(ctx, updates, rows))
            return with_task(state, t, rows.tensors)
        weights = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
        lora = average(ctx, updates, _names(h), weights, state.tensors)
        rows = committed(ctx, combine(ctx, updates, rows, weights, h.reweight))
        tensors = {**state.tensors, **ctx.forms.commit_named(lora)}
        return with_task(State(tensors, {**state.meta, "lora": t}), t, rows.tensors)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the index of the current task, all tasks' prototypes, LoRA and teacher.

        Until a task's first training round the teacher is the LoRA, and they are one part.
        """
        current = current_task(state)
        if current < 0:
            return ()
        names = _names(ctx.hparams)
        parts = [Part(CURRENT, tagged({}, current))]
        parts += [
            Part(task_part(t), tagged(of_task(state, t, ROW_TENSORS), t))
            for t in range(current + 1)
        ]
        latest, before = meta_number(state, "lora"), meta_number(state, "teacher")
        parts.append(Part(lora_part(latest), Payload({n: state.tensors[n] for n in names})))
        if before != latest and ctx.hparams.gamma_kd > 0:
            teacher = {n: state.tensors[f"teacher.{n}"] for n in names}
            parts.append(Part(lora_part(before), Payload(teacher)))
        return tuple(parts)


def _names(h: PloraHparams) -> tuple[str, ...]:
    return lora_names(lora_places(h.blocks))
