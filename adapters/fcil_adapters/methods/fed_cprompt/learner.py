"""Fed-CPrompt's client half: components and head rows, with the contrast (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.fed_cprompt.contrast import Contrast
from fcil_adapters.methods.fed_cprompt.options import FIRST, FedCPromptHparams
from fcil_adapters.numerics.task_parts import find_part
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.prompts.client import (
    component_bench,
    learn,
    plain_objective,
    with_orthogonality,
)
from fcil_adapters.toolkit.prompts.parts import read_parts, upload
from fcil_adapters.toolkit.training.optimise import class_counts


class Learner:
    """Stateless: both teachers are in the broadcast, for clients that join late as well."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the current task's components; the first task has nothing to contrast with."""
        h: FedCPromptHparams = ctx.hparams
        start = read_parts(broadcast)
        bench, tasks = component_bench(ctx, h, start)
        objective = plain_objective
        if h.contrast > 0 and ctx.task.index > 0:
            part = find_part(broadcast, FIRST)
            first = [part.f32(name) for name in HEAD]
            objective = Contrast.of(bench, h, start, first).add
        trained = learn(ctx, bench, data, with_orthogonality(h, tasks, objective))
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)
