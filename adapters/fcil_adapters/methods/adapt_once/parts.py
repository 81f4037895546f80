"""The parts and rounds of adapt_once, and the backbone that they freeze (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.frozen_features import ReplaceableWeights
from fcil_adapters.contract import Context, Kind, Payload, TensorSpec
from fcil_adapters.methods.adapt_once.options import AdaptOnceHparams
from fcil_adapters.numerics.task_parts import CURRENT, find_part, tagged
from fcil_adapters.toolkit.lora.low_rank import Changes
from fcil_adapters.toolkit.lora.merging import merged_backbone
from fcil_adapters.toolkit.lora.tensors import lora_of
from fcil_protocol.errors import DataError

TRAIN, COLLECT = "train", "finish"  # kinds of rounds
ADAPTER = "adapter"  # the part with the LoRA, and the digest of the backbone that it makes
HEAD = "head"  # the part with the head that the LoRA is trained with
PART_DIGEST, UPLOAD_DIGEST = "digest", "adapter_digest"
_BYTES = 32


def digest_spec(name: str) -> TensorSpec:
    """Return the spec of a digest, as bytes."""
    return TensorSpec(name, Kind.COUNT, (_BYTES,), dtype="U8")


def digest_bytes(digest: str) -> NDArray[np.uint8]:
    """Return a digest (hex) as a tensor (32,)."""
    return np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)


def digest_text(payload: Payload, name: str) -> str:
    """Return a payload's digest (hex)."""
    return payload.tensors[name].tobytes().hex()


def training_parts(broadcast: Mapping[str, Payload]) -> dict[str, Payload]:
    """Return the parts of a training round as the shared learner reads them (`lora.manifest`).

    Raises:
        SchemaMismatch: one is missing.
    """
    lora, rows = lora_of(find_part(broadcast, ADAPTER)), find_part(broadcast, HEAD)
    return {CURRENT: tagged({**lora, **rows.tensors}, 0)}


def frozen_backbone(
    h: AdaptOnceHparams, backbone: ReplaceableWeights, broadcast: Mapping[str, Payload]
) -> Any:
    """Return the backbone with the broadcast's LoRA merged; without training it is unchanged.

    Raises:
        SchemaMismatch: the part with the LoRA is missing.
        BackboneMismatch: the merged weights here differ from the server's.
    """
    if not h.adapts:
        return backbone
    part = find_part(broadcast, ADAPTER)
    return merged_backbone(backbone, h.adapt, lora_of(part), digest_text(part, PART_DIGEST))


def weight_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return the change by the LoRA of the first task.

    Raises:
        DataError: the options train none.
    """
    h: AdaptOnceHparams = ctx.hparams
    if not h.adapts:
        raise DataError(
            "this run has no adapter: method.adapt.rounds is 0, so it trained no LoRA.",
            action="Export the whole model: --onnx model.onnx",
        )
    return Changes.of(h.adapt.scale, [lora_of(find_part(broadcast, ADAPTER))])
