"""LoRM's client half: train one factor of the LoRA, then describe the layers' inputs (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.lorm.inputs import input_roots, merged_tasks_view
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.methods.lorm.parts import (
    HEAD_ROOT,
    TaskLora,
    no_roots,
    read_tasks,
    root_names,
)
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.manifest import read_parts, sent_names
from fcil_adapters.toolkit.training.optimise import class_counts


class Learner:
    """Stateless: the broadcast holds the LoRA of all tasks."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the round's factor and the head; after the rounds, describe the task's inputs.

        Training sees the current task's LoRA alone, the description the merge of all tasks.
        """
        h: LormHparams = ctx.hparams
        *past, now = read_tasks(h, broadcast)
        if ctx.kind == "finish":
            told = tally(ctx.task.classes, class_counts(data, ctx.task.classes))
            tasks = (*past, now)
            roots = input_roots(ctx, tasks, data, factor="A", head=False, report=True)
            return state, Payload(told | roots)
        bench = LoraSetup.of(ctx, read_parts(h, broadcast))
        if h.single_column(ctx.task):  # its row is made of features as images are classified with
            bench = replace(bench, view=merged_tasks_view(ctx.backbone, h, (*past, now)))
        sent = Payload(train_round(ctx, bench, data))
        own = {name: sent.f32(name) for name in sent_names(h, ctx.round)}
        factor = h.factors_of(ctx.round)
        if all(np.isfinite(array).all() for array in own.values()):
            tasks = (*past, TaskLora({**now.lora, **own}))
            roots = input_roots(ctx, tasks, data, factor=factor, head=True, report=False)
        else:  # the daemon refuses to send this, and says why
            roots = dict(no_roots(h, ctx.backbone_info, (*root_names(h, factor), HEAD_ROOT)))
        return state, Payload({**sent.tensors, **roots})
