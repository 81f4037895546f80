"""FedAvg-Prompt's client half, which is HePCo's (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.toolkit.prompts.client import learn_pools
from fcil_adapters.toolkit.prompts.parts import read_parts, upload
from fcil_adapters.toolkit.training.optimise import class_counts
from fcil_protocol.payloads.payload import Payload


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train pools, keys and the task's head rows on local images."""
        trained = learn_pools(ctx, ctx.hparams, read_parts(broadcast), data)
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)
