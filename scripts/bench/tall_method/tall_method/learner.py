"""HGP's client half, with Gaussians of many random features in place of the few images'."""

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.methods.hgp import learner
from fcil_adapters.toolkit.gaussians.gaussian import describe, pack_gaussians
from fcil_protocol.payloads.payload import Payload

IMAGES = 400  # of a class; a triangle is sent from 386 on at width 768


class Learner:
    """Trains as HGP does, and then tells of more images than there are."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return HGP's payload with other Gaussians and counts."""
        state, payload = learner.Learner().run(ctx, state, broadcast, data)
        d, classes = payload.f32("head.weight").shape[1], len(ctx.task.classes)
        rng = np.random.default_rng((*ctx.seed, ctx.round))
        h = ctx.hparams
        many = (rng.standard_normal((IMAGES, d)) for _ in range(classes))
        drawn = [describe(x, h.cov, h.cov_rank) for x in many]
        told = {
            **pack_gaussians(drawn, d, h.cov),
            "count": np.full(classes, IMAGES, dtype=np.int64),
            "n": np.array([IMAGES * classes], dtype=np.int64),
        }
        return state, Payload({**payload.tensors, **told}, payload.meta)
