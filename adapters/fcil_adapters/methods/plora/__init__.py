"""PLoRA: Federated Class-Incremental Learning with Prototype Guided Transformer.

Haiyang Guo, Fei Zhu, Wenzhuo Liu, Xu-Yao Zhang, Cheng-Lin Liu. 2024.
https://arxiv.org/abs/2401.02094v1 (the first version of PILoRA)

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md leads from the equations to the
functions, with every deviation.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Claim,
    Exchange,
    Kind,
    MetaSpec,
    Method,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
    can_start,
    every_rule,
)
from fcil_adapters.methods.plora.options import ECONOMIES, PRESETS, PloraHparams
from fcil_adapters.toolkit.lora.tensors import lora_names, lora_places, lora_specs
from fcil_adapters.toolkit.prototypes.rows import (
    prototype_exchanges,
    prototype_statistics,
    row_specs,
)


def exchanges(hparams: PloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the exchanges of a task: class means first (if used), then the training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    return prototype_exchanges(hparams, _lora(hparams, backbone))


def broadcast(hparams: PloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part, of a task's part and of a LoRA."""
    meta = (MetaSpec("task", "int"),)
    return {
        "current": PayloadSchema((), meta),
        "task": PayloadSchema(row_specs("rows"), meta, at_most=(("rows", "seen"),)),
        "lora": PayloadSchema(_lora(hparams, backbone)),
    }


def dims(hparams: PloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, the rank r, the task's classes c and the classes seen so far."""
    return {
        "d": backbone.dim,
        "r": hparams.rank,
        "c": len(task.classes),
        "seen": len(task.seen),
    }


def _lora(hparams: PloraHparams, backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    check_blocks("plora", hparams.blocks, backbone)
    return lora_specs(lora_names(lora_places(hparams.blocks)), backbone)


def _half(name: str) -> str:
    return f"fcil_adapters.methods.plora.{name}"


METHOD = Method(
    name="plora",
    version="2",
    title="PLoRA: Federated Class-Incremental Learning with Prototype Guided Transformer",
    citation="H. Guo, F. Zhu, W. Liu, X.-Y. Zhang, C.-L. Liu. 2024. "
    "https://arxiv.org/abs/2401.02094v1",
    hparams=PloraHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner=_half("learner:Learner"),
    aggregator=_half("aggregator:Aggregator"),
    model=_half("model:Model"),
    changes=_half("parts:weight_changes"),
    starts=can_start,
    presets=PRESETS,
    cadence={"current": Cadence.OPENING, "task": Cadence.OWN, "lora": Cadence.TRAINED},
    averagings=every_rule,
    statistics=prototype_statistics,
    half=(Kind.LORA, Kind.PROTOTYPE),
    claim=Claim(
        said="0.77 million parameters a round",
        up_bytes=307_200,
        down_bytes=None,
        leaves_out="the download; the number is that of ten clients together",
    ),
    economies=ECONOMIES,
)
