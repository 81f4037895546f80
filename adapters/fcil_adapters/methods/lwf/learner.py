"""LwF's client half: the task's cross-entropy, and the last model's scores of past classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor
from torch.nn import functional

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.lwf.options import LwfHparams
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.lora.client import LoraSetup, Pass, Teacher, cross_entropy, train_round
from fcil_adapters.toolkit.lora.distillation import softened
from fcil_adapters.toolkit.lora.manifest import read_parts


class Learner:
    """Stateless: the teacher is a part of the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train; for a task whose loss has one column, return its mean feature instead."""
        h: LwfHparams = ctx.hparams
        received = read_parts(h, broadcast)
        bench = LoraSetup.of(ctx, received)
        teacher = Teacher.of(ctx, received)

        def loss(seen: Pass) -> Tensor:
            if teacher is None:
                return cross_entropy(seen)
            said = teacher.logits(seen.piece.pixels)  # (b, C)
            given = past_scores(bench, teacher, seen)
            return cross_entropy(seen) + h.alpha * softened(given, said, h.temperature)

        return state, Payload(train_round(ctx, bench, data, loss=loss))


def past_scores(bench: LoraSetup, teacher: Teacher, seen: Pass) -> Tensor:
    """Return the model's scores of the teacher's classes: (b, C)."""
    if bench.h.past_rows == "together":
        past = np.asarray(teacher.classes, dtype=np.int64)
        columns = to_torch(class_positions(past, bench.classes), bench.backbone.device)
        return seen.logits[:, columns]
    # Past rows stay fixed, so the teacher's are the student's too.
    return functional.linear(seen.features, teacher.weight, teacher.bias)
