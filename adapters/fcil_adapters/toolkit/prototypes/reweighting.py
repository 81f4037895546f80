"""Combine the clients' prototypes class by class, guided by their mean features.

Guo et al., PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning, ECCV
2024, https://arxiv.org/abs/2401.02094, section 4.2: Algorithm 1, equations 11-14; PLoRA uses it
unchanged. A prototype near the owners' mean features gets much of the weight; one that was pushed
away on a client without the class gets little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fcil_adapters.numerics.client_weights import class_weights
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.prototypes.options import ReweightOptions

SMALLEST_DISTANCE = 1e-12
# Inverse distances nearer to each other than this (relative) are equal: stretching them to
# [0, 1] would turn rounding errors into weights.
EQUAL = 1e-9


def reweight(
    protos: Tensor,
    means: Tensor,
    counts: Tensor,
    previous: Tensor,
    weights: Tensor,
    *,
    options: ReweightOptions,
    max_share: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Combine prototypes; all classes and clients at once, in float64.

    Args:
        protos: (K, C, d), every client's prototypes of the task's classes.
        means: (K, C, d), mean features; ignored where the count is 0.
        counts: (K, C), images behind each mean; 0: the client has no mean of the class.
        previous: (C, d), the global prototypes before this round.
        weights: (K,), the clients' sample weights, used by plain averaging; they sum to 1.
        options: of the combination.
        max_share: cap on one owner's part of the owners' weight in a class that several have, and
            with ``count_weighted`` on its part of the class's images; at 1 there is none.

    Returns:
        The new prototypes (C, d), and omega (K, C): each column sums to 1, or is all zero where the
            previous prototype is kept.
    """
    protos, previous, weights = protos.double(), previous.double(), weights.double()
    K = protos.shape[0]
    owners = counts >= options.min_count  # (K, C)
    if options.enabled:
        distances = _distances(protos, means.double(), counts, owners, options, max_share)
        takes_part = owners if options.owners_only else torch.ones_like(owners)
        omega = _capped(_omega(distances, takes_part, options), owners, max_share)  # (K, C)
    else:
        omega = weights[:, None].expand_as(owners)
    empty = ~owners.any(0)  # (C,)
    fallback = torch.full_like(omega, 1 / K if options.empty == "uniform" else 0.0)
    omega = torch.where(empty, fallback, omega)
    combined = torch.einsum("kc,kcd->cd", omega, protos)
    if options.empty == "keep":
        combined = torch.where(empty[:, None], previous, combined)
    return combined, omega


def _distances(
    protos: Tensor,
    means: Tensor,
    counts: Tensor,
    owners: Tensor,
    options: ReweightOptions,
    max_share: float,
) -> Tensor:
    """Sum over the owners i of the distance from each client's prototype to i's mean: (K, C)."""
    means = torch.where(owners[:, :, None], means, 0)
    # (C, K, K): from client k's prototype to client i's mean, without expanding the square
    pairwise = torch.cdist(
        protos.transpose(0, 1),
        means.transpose(0, 1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    if options.distance == "squared":
        pairwise = pairwise.square()
    share = owners.double()  # (K, C)
    if options.count_weighted:
        images = (counts * owners).cpu().numpy()
        share = to_torch(class_weights(images, max_share), counts.device)
    return torch.einsum("cki,ic->kc", pairwise, share)


def _capped(omega: Tensor, owners: Tensor, max_share: float) -> Tensor:
    """Cap each owner's part of the owners' weight; the other owners get the excess.

    A client that claims images of a class sends a mean as well, and can send one at its own
    prototype and far from the others'.
    """
    if max_share >= 1:
        return omega
    own = omega * owners
    shares = to_torch(class_weights(own.cpu().numpy(), max_share), omega.device)
    return torch.where(owners, shares * own.sum(0), omega)


def _omega(distances: Tensor, takes_part: Tensor, options: ReweightOptions) -> Tensor:
    """Turn summed distances (K, C) into weights (K, C) over the clients that take part."""
    closeness = 1 / distances.clamp_min(SMALLEST_DISTANCE)
    low = closeness.masked_fill(~takes_part, torch.inf).amin(0)  # (C,)
    high = closeness.masked_fill(~takes_part, -torch.inf).amax(0)
    spread = high - low
    equal = ~(spread > EQUAL * high)  # (C,) also where no client takes part
    a = torch.where(equal, 0.0, (closeness - low) / torch.where(equal, 1.0, spread))
    logits = a / options.eta if options.temperature == "div" else a * options.eta
    # A class without any part-taker keeps finite logits; the caller replaces its column.
    barred = ~takes_part & takes_part.any(0)
    return torch.softmax(logits.masked_fill(barred, -torch.inf), 0)
