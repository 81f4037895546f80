"""An adapter in the format of the PEFT library: its layers, its files' contents, its description.

Torch-free. PEFT adds ``alpha / r * B A`` to the weight of a whole Linear, and timm computes q, k
and v of a block by one: so the factors of q and v become one pair for ``attn.qkv``, exactly.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.export.folder import ABOUT, CARD, FolderInfo
from fcil_adapters.toolkit.lora.low_rank import Change, Changes
from fcil_adapters.toolkit.lora.tensors import PLACES, AdaptedLinear, module_shape

F32 = NDArray[np.float32]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (ABOUT, CONFIG, WEIGHTS, CARD)  # PEFT writes the others too

PREFIX = "base_model.model."
HEAD = "head"  # timm's name of a transformer's last layer


class AdapterInfo(FolderInfo):
    """Description of an exported adapter.

    Attributes:
        ranks: layer -> rank.
        factored: layers whose pair is of a singular value decomposition.
    """

    ranks: dict[str, int]
    factored: tuple[str, ...]


@dataclass(frozen=True)
class AdapterLayer:
    """The pair of one Linear: W becomes ``W + scale B A``.

    Attributes:
        A: (R, in).
        B: (out, R).
        factored: True if it is a factorisation of the change, not the run's own factors.
    """

    A: F32
    B: F32
    factored: bool


def adapter_layers(changes: Changes, info: BackboneInfo) -> dict[str, AdapterLayer]:
    """Return the pair of each changed Linear by its name in timm's model, in order.

    Args:
        changes: of the modules of the blocks.
        info: widths of the modules.
    """
    return {name: _joined(own, linear, info) for name, linear, own in changed_linears(changes)}


def changed_linears(
    changes: Changes,
) -> Iterator[tuple[str, AdaptedLinear, dict[str, Change]]]:
    """Yield each changed Linear: its name in timm's model, itself, its modules' changes."""
    for block in sorted({int(place.partition(".")[0]) for place in changes.places}):
        for linear in PLACES:
            own = linear.own(_of_block(changes.places, block))
            if own:
                yield f"blocks.{block}.{linear.owner}.{linear.name}", linear, own


def _of_block(places: Mapping[str, Change], block: int) -> dict[str, Change]:
    return {
        place.partition(".")[2]: change
        for place, change in places.items()
        if place.startswith(f"{block}.")
    }


def _joined(own: Mapping[str, Change], linear: AdaptedLinear, info: BackboneInfo) -> AdapterLayer:
    """Return one pair: A's below each other, each B in the rows of its slice, else zeros."""
    slices = linear.slices(own)
    out, width = module_shape(slices[0], info)
    many = {module: change.factors() for module, change in own.items()}
    rank = sum(len(A) for A, _, _ in many.values())
    joined_a = np.zeros((rank, width), np.float32)
    joined_b = np.zeros((out * len(slices), rank), np.float32)
    start = 0
    for module, (A, B, _) in many.items():
        columns = slice(start, start + len(A))
        first = slices.index(module) * out
        joined_a[columns] = A
        joined_b[first : first + out, columns] = B
        start += len(A)
    return AdapterLayer(joined_a, joined_b, any(factored for _, _, factored in many.values()))


def adapter_tensors(
    layers: Mapping[str, AdapterLayer], head: tuple[F32, F32] | None
) -> dict[str, F32]:
    """Return the tensors of `WEIGHTS`.

    Args:
        layers: of `adapter_layers`.
        head: weight (C, d) and bias (C,); None: none.
    """
    tensors = {
        f"{PREFIX}{name}.lora_{factor}.weight": values
        for name, layer in layers.items()
        for factor, values in (("A", layer.A), ("B", layer.B))
    }
    if head is not None:
        tensors |= {f"{PREFIX}{HEAD}.weight": head[0], f"{PREFIX}{HEAD}.bias": head[1]}
    return tensors


def adapter_config(
    layers: Mapping[str, AdapterLayer], scale: float, backbone: str, *, with_head: bool
) -> bytes:
    """Return the content of `CONFIG`.

    Args:
        layers: of `adapter_layers`.
        scale: factor of every product; alpha is scale times rank.
        backbone: name of the base model.
        with_head: True if the head's weights are in the adapter.
    """
    ranks = {name: len(layer.A) for name, layer in layers.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": {
            "base_model_class": "VisionTransformer",
            "parent_library": "timm.models.vision_transformer",
        },
        "base_model_name_or_path": backbone,
        "r": usual,
        "lora_alpha": _number(scale * usual),
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: _number(scale * rank) for name, rank in others.items()},
        "modules_to_save": [HEAD] if with_head else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
