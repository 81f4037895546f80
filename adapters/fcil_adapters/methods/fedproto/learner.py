"""FedProto's client half: train, pulled to the global prototypes, and send its own (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.fedproto.options import FedprotoHparams
from fcil_adapters.methods.fedproto.parts import read_prototypes
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.lora.client import LoraSetup, Pass, cross_entropy, train_round
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.training.optimise import FeatureSums, sum_features


class Learner:
    """Stateless: the global prototypes are a part of the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train, then average the features of each class.

        With noise they are averaged first: a bound on an image's influence holds for a model that
        has not been trained on it (docs/privacy.md).
        """
        h: FedprotoHparams = ctx.hparams
        bench = LoraSetup.of(ctx, read_parts(h, broadcast))
        classes, rows = read_prototypes(broadcast)
        pull = Pull.of(bench, ctx.task.classes, classes, rows)

        def loss(seen: Pass) -> Tensor:
            return cross_entropy(seen) + h.pull * len(seen.features) * pull(seen)

        before = _sums(ctx, bench, data) if ctx.privacy.on else None
        sent = train_round(ctx, bench, data, loss=loss)
        sums = before or _sums(ctx, bench, data)
        owned = sums.counts >= h.min_count_upload
        sent["proto"] = sums.means[owned].astype(np.float32)
        sent["owned"] = np.asarray(ctx.task.classes, dtype=np.int64)[owned]
        return state, Payload(sent)


def _sums(ctx: Context, bench: LoraSetup, data: ImageSet) -> FeatureSums:
    size = bench.h.batch_size
    return sum_features(ctx, bench.features, data, batch_size=size, report=False)


class Pull:
    """The distance of the class means of some images to the global prototypes (Tan et al., Eq. 7).

    Attributes:
        columns: the bench's column of each class of the task that has a prototype, (k,).
        prototypes: (k, d).
    """

    def __init__(self, columns: Tensor, prototypes: Tensor) -> None:
        self.columns = columns
        self.prototypes = prototypes

    @classmethod
    def of(
        cls,
        bench: LoraSetup,
        task: tuple[int, ...],
        classes: tuple[int, ...],
        rows: F32,
    ) -> Pull:
        """Select the prototypes of the task's classes."""
        mine = np.isin(np.asarray(classes, dtype=np.int64), task)
        own = [c for c, ok in zip(classes, mine, strict=True) if ok]
        columns = np.array([bench.classes.index(c) for c in own], dtype=np.int64)
        device = bench.backbone.device
        return cls(to_torch(columns, device), to_torch(rows[mine], device))

    def __call__(self, seen: Pass) -> Tensor:
        """Return ``sum_c mean_d (p_c - m_c)^2`` over the classes among the images."""
        among = (seen.piece.rows[None, :] == self.columns[:, None]).to(
            seen.features.dtype
        )  # (k, b)
        counts = among.sum(1)  # (k,)
        here = counts > 0
        means = among[here] @ seen.features / counts[here, None]
        distance = functional.mse_loss(means, self.prototypes[here], reduction="none")
        return distance.mean(1).sum() if len(distance) else torch.zeros((), device=counts.device)
