"""Repair the averaged server on latents: prompts after the teachers', head after labels (torch).

Halbe et al., section 5.3, equation 6. Blocks share no parameter, so each is distilled by itself
and only one block's pools of all clients are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.methods.hepco.generator import Tick
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.teachers import Head

# Residuals below this share of the largest prompt entry are rounding errors. Adam would turn
# them into full steps; with one client the server already equals its teacher and must stay.
EQUAL = 1e-10
_TARGET_BYTES = 64 << 20  # of the teachers' prompts at once: 8 steps with the default sizes


@dataclass(frozen=True)
class Pools:
    """Keys and prompts of one block, of one or many models, in float64.

    Attributes:
        keys: (..., M, d).
        prompts: (..., M, L d).
    """

    keys: Tensor
    prompts: Tensor

    def cosines(self, z: Tensor) -> Tensor:
        """Return cos(z_b, key_m) for latents (B, d): (..., B, M)."""
        return functional.normalize(z, dim=-1) @ functional.normalize(self.keys, dim=-1).mT


def mean_target(teachers: Pools, z: Tensor, shares: Tensor) -> Tensor:
    """Return the teachers' prompts for latents (B, d), averaged with ``shares`` (B, K): (B, L d).

    ``sum_k a_k ||p - p_k||^2`` equals ``A ||p - sum_k a_k p_k / A||^2`` up to a constant, with
    ``A = sum_k a_k``: one product with all clients' pools, and no tensor per client.
    """
    parts = shares / shares.sum(1, keepdim=True)  # (B, K)
    mixed = teachers.cosines(z) * parts.T[:, :, None]  # (K, B, M)
    return mixed.transpose(0, 1).flatten(1) @ teachers.prompts.flatten(0, 1)


def prompt_loss(server: Pools, teachers: Pools, z: Tensor, shares: Tensor) -> Tensor:
    """Return ``sum_b sum_k a_{k,y_b} ||p_s(z_b) - p_k(z_b)||^2``, up to a constant (Eq. 6).

    Args:
        server: (M, d), (M, L d).
        teachers: (K, M, d), (K, M, L d); the previous server is one of them.
        z: (B, d).
        shares: (B, K); at least one of each row is not 0.
    """
    return _distance(server, mean_target(teachers, z, shares), z, shares)


def _distance(server: Pools, target: Tensor, z: Tensor, shares: Tensor) -> Tensor:
    """Return `prompt_loss` with the teachers' mean prompts (B, L d) at hand."""
    prompts = server.cosines(z) @ server.prompts  # (B, L d)
    residual = prompts - target
    distinct = residual.detach().abs() > EQUAL * prompts.detach().abs().amax()
    return ((residual * distinct).square() * shares.sum(1, keepdim=True)).sum()


def _with_targets(
    teachers: Pools, z: Tensor, shares: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each step's latents (B, d), shares (B, K) and teachers' mean prompts (B, L d).

    The teachers do not change, so some steps' prompts come of one product: with many clients it
    is most of a step's work, and of larger matrices it takes two thirds of the time.
    """
    row_bytes = teachers.prompts.shape[-1] * teachers.prompts.element_size()
    steps = max(1, _TARGET_BYTES // (z.shape[1] * row_bytes))
    for some, weights in zip(torch.split(z, steps), torch.split(shares, steps), strict=True):
        targets = mean_target(teachers, some.flatten(0, 1), weights.flatten(0, 1))
        yield from zip(some, weights, targets.view(*some.shape[:2], -1), strict=True)


def distill_pools(
    start: Pools, teachers: Pools, z: Tensor, shares: Tensor, h: HepcoHparams, tick: Tick
) -> Pools:
    """Regress one block's prompts and keys on the teachers', one batch per step.

    Args:
        start: the provisional server's.
        teachers: all clients', the round's start and the previous server where they teach.
        z: (S, B, d).
        shares: (S, B, K).
        h: ``lr_distillation`` and ``mse_reduction``.
        tick: receives the loss of each step.
    """
    server = Pools(_leaf(start.keys), _leaf(start.prompts))
    scale = 1 / start.prompts.shape[-1] if h.mse_reduction == "mean" else 1.0
    optimiser = torch.optim.Adam([server.keys, server.prompts], lr=h.lr_distillation)
    for latents, weights, target in _with_targets(teachers, z, shares):
        optimiser.zero_grad()
        loss = scale * _distance(server, target, latents, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        tick(loss.item())
    return Pools(server.keys.detach(), server.prompts.detach())


def distill_head(start: Head, z: Tensor, own: Tensor, h: HepcoHparams, tick: Tick) -> Head:
    """Train the head on hard labels: mean cross-entropy of (S, B, d) under (S, B, C)."""
    server = Head(_leaf(start.weight), _leaf(start.bias))
    optimiser = torch.optim.Adam([server.weight, server.bias], lr=h.lr_distillation)
    for latents, labels in zip(z, own, strict=True):
        optimiser.zero_grad()
        loss: Tensor = -(server.logits(latents).log_softmax(-1) * labels).sum() / len(labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        tick(loss.item())
    return Head(server.weight.detach(), server.bias.detach())


def _leaf(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone())
