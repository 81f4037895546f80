"""CODA-Prompt's client half: train the task's components and head rows (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.toolkit.prompts.client import component_bench, learn, with_orthogonality
from fcil_adapters.toolkit.prompts.options import ComponentHparams
from fcil_adapters.toolkit.prompts.parts import read_parts, upload
from fcil_adapters.toolkit.training.optimise import class_counts


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train the current task's components; past ones take part and stay as they are."""
        h: ComponentHparams = ctx.hparams
        bench, tasks = component_bench(ctx, h, read_parts(broadcast))
        trained = learn(ctx, bench, data, with_orthogonality(h, tasks))
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)
