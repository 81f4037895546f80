"""Objective of a generator: latents that the teachers recognise and the server does not.

Halbe et al., equations 2 to 5; the order and the weights of the terms are in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.teachers import Head, Teachers


@dataclass(frozen=True)
class PoolGap:
    """Distance of the teachers' prompts in one block from the server's, for any query.

    The squared distance of two mixed prompts is a quadratic form in the cosines, with the
    inner products of all pool prompts as its matrix; so no prompt is ever built.

    Attributes:
        server_key: (M, d), rows of length 1.
        keys: (K, M, d), likewise.
        server: (M, M), inner products of the server's prompts.
        cross: (K, M, M), of the server's with the teachers'.
        teachers: (K, M, M), of each teacher's.
    """

    server_key: Tensor
    keys: Tensor
    server: Tensor
    cross: Tensor
    teachers: Tensor

    @classmethod
    def of(cls, server_key: Tensor, server: Tensor, keys: Tensor, pools: Tensor) -> PoolGap:
        """Prepare a block: keys (M, d), prompts (M, L d), teachers' (K, M, d), (K, M, L d)."""
        return cls(
            server_key=functional.normalize(server_key, dim=-1),
            keys=functional.normalize(keys, dim=-1),
            server=server @ server.T,
            cross=server @ pools.mT,
            teachers=pools @ pools.mT,
        )

    def squared(self, z: Tensor) -> Tensor:
        """Return ``||p_s(z) - p_k(z)||^2`` for latents (B, d): (K, B)."""
        unit = functional.normalize(z, dim=-1)
        ours = unit @ self.server_key.T  # (B, M)
        theirs = unit @ self.keys.mT  # (K, B, M)
        own = ((ours @ self.server) * ours).sum(-1)  # (B,)
        mixed = ((ours @ self.cross) * theirs).sum(-1)  # (K, B)
        return own - 2 * mixed + ((theirs @ self.teachers) * theirs).sum(-1)


@dataclass(frozen=True)
class Objective:
    """``L_cls - lambda_kl L_KL - lambda_mse L_MSE`` for one generator (Eq. 5).

    Attributes:
        server: the provisional server's head.
        gaps: per block; empty where the queries are detached, which leaves L_MSE without a
            gradient to the latents.
        entries: L d, by which ``mse_reduction = "mean"`` divides.
    """

    h: HepcoHparams
    teachers: Teachers
    server: Head
    gaps: Sequence[PoolGap]
    entries: int

    def __call__(self, z: Tensor, own: Tensor) -> Tensor:
        """Return the objective of latents (B, d) with one-hot labels (B, C), summed over B."""
        shares = self.teachers.of_labels(own).T  # (K, B)
        theirs = self.teachers.heads.logits(z).log_softmax(-1)  # (K, B, C)
        ours = self.server.logits(z).log_softmax(-1)  # (B, C)
        loss = -(shares * (theirs * own).sum(-1)).sum()  # Eq. 2 and 3
        if self.h.lambda_kl > 0:
            first, second = theirs, ours.expand_as(theirs)
            if self.h.kl == "student_teacher":
                first, second = second, first
            divergence = (first.exp() * (first - second)).sum(-1)  # (K, B), Eq. 4a
            loss = loss - self.h.lambda_kl * (shares * divergence).sum()
        for gap in self.gaps:
            scale = self.h.lambda_mse / (self.entries if self.h.mse_reduction == "mean" else 1)
            loss = loss - scale * (shares * gap.squared(z)).sum()  # Eq. 4b
        return loss
