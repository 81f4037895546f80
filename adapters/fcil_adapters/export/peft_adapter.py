"""An adapter in the format of the PEFT library: its layers, its files' contents, its description.

Torch-free. PEFT adds ``alpha / r * B A`` to the weight of a whole Linear, and timm computes q, k
and v of a block by one: so the factors of q and v become one pair for ``attn.qkv``, exactly.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fcil_adapters.contract import BackboneInfo, Preprocessing
from fcil_adapters.export.exported_model import BackboneName, Checked
from fcil_adapters.toolkit.lora.low_rank import Change, Changes
from fcil_adapters.toolkit.lora.tensors import PLACES, AdaptedLinear, module_shape

F32 = NDArray[np.float32]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ABOUT = "fcil.json"
CARD = "README.md"
FILES = (ABOUT, CONFIG, WEIGHTS, CARD)  # PEFT writes the others too
FORMAT = 1

PREFIX = "base_model.model."
HEAD = "head"  # timm's name of a transformer's last layer

Scores = Literal["same", "shifted", "scaled", "none"]


class AdapterInfo(BaseModel):
    """Description of an exported adapter, `ABOUT` in its folder.

    Attributes:
        federation, run, task, state: origin of the model; the task is the last one in it.
        classes: class ids, one for each output of the head; without a head those of the model.
        names: of the classes; "" where the exporting side did not know one.
        scores: what the head's outputs are: ``same``, ``shifted`` or ``scaled``
            (`heads.scorer.LinearLayer`), or ``none`` without a head.
        ranks: layer -> rank.
        factored: layers whose pair is of a singular value decomposition.
        checked: result of the comparison with the torch model; ``provider`` is the library.
        created: ISO 8601, UTC.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: int = FORMAT
    method: str
    method_version: str
    federation: str
    run: str
    task: int = Field(ge=0)
    state: int = Field(ge=0)
    classes: tuple[int, ...]
    names: tuple[str, ...]
    preprocessing: Preprocessing
    backbone: BackboneName
    scores: Scores
    ranks: dict[str, int]
    factored: tuple[str, ...]
    checked: Checked
    created: str


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
    found: dict[str, AdapterLayer] = {}
    for block in sorted({int(place.partition(".")[0]) for place in changes.places}):
        for linear in PLACES:
            own = linear.own(_of_block(changes.places, block))
            if own:
                name = f"blocks.{block}.{linear.owner}.{linear.name}"
                found[name] = _joined(own, linear, info)
    return found


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
