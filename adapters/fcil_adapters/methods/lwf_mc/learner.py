"""FedLwF.MC's client half: a binary cross-entropy for every seen class (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.distillation import SigmoidTargets
from fcil_adapters.toolkit.lora.manifest import read_parts


class Learner:
    """Stateless: the teacher is a part of the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train; for a very first task of one class, return its mean feature instead."""
        received = read_parts(ctx.hparams, broadcast)
        bench = LoraSetup.of(ctx, received)
        loss = SigmoidTargets.of(ctx, bench, received)
        return state, Payload(train_round(ctx, bench, data, loss=loss))
