"""FedCLM's client half: train by cross-entropy; at the end, send the class means (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.nearest_mean import report_means


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train, or send the class means of the task under the trained model."""
        received = read_parts(ctx.hparams, broadcast)
        if ctx.kind == "finish":
            return state, report_means(ctx, received, data)
        return state, Payload(train_round(ctx, LoraSetup.of(ctx, received), data))
