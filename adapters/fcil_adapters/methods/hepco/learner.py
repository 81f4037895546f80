"""HePCo's client half: train prompt pools, keys and the task's head rows (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.parts import read_parts
from fcil_adapters.toolkit.prompts.client import learn_pools
from fcil_adapters.toolkit.prompts.parts import upload
from fcil_adapters.toolkit.training.optimise import class_counts


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train on local images; tell how many there are of each class, or in all."""
        h: HepcoHparams = ctx.hparams
        trained = learn_pools(ctx, h, read_parts(broadcast), data)
        sent = upload(trained, ctx.task.classes, class_counts(data, ctx.task.classes))
        if h.send_counts:
            return state, sent
        return state, Payload({n: array for n, array in sent.tensors.items() if n != "count"})
