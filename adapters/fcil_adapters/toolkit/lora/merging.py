"""LoRA merged into a backbone's weights once and for all, by any engine (torch-free).

Every machine must get the same bits, since features of the merged weights are added up. So one
function computes them, without a matrix product, whose order of additions differs between
libraries; a digest shows any difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.frozen_features import ReplaceableWeights
from fcil_adapters.backbones.weights import weights_digest
from fcil_adapters.contract import BackboneInfo
from fcil_adapters.toolkit.lora.options import LoraHparams
from fcil_adapters.toolkit.lora.tensors import F32, PLACES
from fcil_protocol.errors import BackboneMismatch, DataError


def merged_weights(
    backbone: ReplaceableWeights, h: LoraHparams, lora: Mapping[str, F32]
) -> dict[str, F32]:
    """Return ``W + scale B A`` of every adapted Linear, by its name in the state dict.

    Each is computed in float64 and rounded once; with B = 0 it is W.

    Args:
        backbone: has W.
        h: blocks, modules and scale.
        lora: the factors (`lora.tensors`).

    Raises:
        DataError: a number is not finite, which makes the weights useless.
    """
    found: dict[str, F32] = {}
    for block in sorted(h.blocks):
        for place in PLACES:
            slices = place.slices(h.modules)
            modules = [m for m in slices if m in h.modules]
            if not modules:
                continue
            name = f"blocks.{block}.{place.owner}.{place.name}.weight"
            merged = backbone.weight(name).astype(np.float64)
            rows = dict(zip(slices, np.split(merged, len(slices)), strict=True))
            for module in modules:
                A, B = (lora[f"lora.{block}.{module}.{factor}"] for factor in "AB")
                rows[module] += h.scale * _product(A, B)
            if not np.isfinite(merged).all():
                raise DataError(
                    f"the LoRA of block {block}, {place.name}, holds NaN or infinity, or makes the "
                    "weights so.",
                    action="Lower the steps of the training (lr_lora), and begin again.",
                )
            found[name] = merged.astype(np.float32)
    return found


def merged_digest(backbone: BackboneInfo, weights: Mapping[str, F32]) -> str:
    """Return the digest of a backbone with these weights in the place of its own (hex)."""
    text = f"{backbone.digest} with {weights_digest(sorted(weights.items()))}"
    return hashlib.sha256(text.encode()).hexdigest()


def merged_backbone(
    backbone: ReplaceableWeights, h: LoraHparams, lora: Mapping[str, F32], digest: str
) -> Any:
    """Return the backbone with LoRA merged, of the same engine; the last one is used again.

    Args:
        backbone: without LoRA; it keeps the result (`ReplaceableWeights.variant`).
        h: blocks, modules and scale.
        lora: the factors.
        digest: that the server computed (`merged_digest`).

    Raises:
        BackboneMismatch: the weights here differ.
        DataError: see `merged_weights`.
    """
    known = backbone.variant
    if known is not None and known.info.digest == digest:
        known.alive = backbone.alive  # of this call
        return known
    weights = merged_weights(backbone, h, lora)
    found = merged_digest(backbone.info, weights)
    if found != digest:
        raise BackboneMismatch(
            f"the backbone with the LoRA merged has digest {found[:12]} here and {digest[:12]} on "
            "the server.",
            action="Use the same weights file and the same version of fcil on every device.",
        )
    return backbone.with_weights(weights, digest)


def _product(A: F32, B: F32) -> NDArray[np.float64]:
    """Return B A (out, in): products of float32 are exact, and added rank by rank."""
    total = np.zeros((len(B), A.shape[1]))
    for row, column in zip(A.astype(np.float64), B.T.astype(np.float64), strict=True):
        total += np.outer(column, row)
    return total
