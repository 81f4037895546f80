"""Fed-TaLoRA's client half: train the shared LoRA and the head's rows on local images (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.fed_talora.parts import read_parts
from fcil_adapters.methods.fed_talora.views import training_view
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round


class Learner:
    """Stateless: residuals are summed from the broadcast's parts each time, so none is missed."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train LoRA and head; for a task of one class, return its mean feature instead."""
        received = read_parts(ctx.hparams, broadcast)
        view = training_view(ctx.backbone, ctx.hparams, received)
        bench = LoraSetup.of(ctx, received.room, view)
        return state, Payload(train_round(ctx, bench, data), {"version": received.version})
