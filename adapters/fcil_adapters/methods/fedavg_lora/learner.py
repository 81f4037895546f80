"""FedAvg-LoRA's client half: train LoRA and the head's rows by cross-entropy (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.toolkit.lora.client import Bench, train_round
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_protocol.payloads.payload import Payload


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train; for a task of one class, return its mean feature instead."""
        bench = Bench.of(ctx, read_parts(ctx.hparams, broadcast))
        return state, Payload(train_round(ctx, bench, data))
