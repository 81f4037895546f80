"""PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning.

Haiyang Guo, Fei Zhu, Wenzhuo Liu, Xu-Yao Zhang, Cheng-Lin Liu. ECCV 2024.
https://arxiv.org/abs/2401.02094, code: https://github.com/Ghy0501/PILoRA

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
    every_rule,
)
from fcil_adapters.methods.pilora.options import ECONOMIES, PRESETS, PiloraHparams
from fcil_adapters.toolkit.lora.tensors import lora_names, lora_places, lora_specs
from fcil_adapters.toolkit.prototypes.rows import (
    prototype_exchanges,
    prototype_spec,
    prototype_statistics,
    row_specs,
)


def exchanges(hparams: PiloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the exchanges of a task: class means first (if used), then the training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    return prototype_exchanges(hparams, _lora(hparams, backbone))


def broadcast(hparams: PiloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part and of a task's part."""
    meta = (MetaSpec("task", "int"),)
    future = (prototype_spec("future", "future"),) if hparams.candidates == "all" else ()
    task = (*_lora(hparams, backbone), *row_specs("rows"))
    return {
        "current": PayloadSchema(future, meta),
        "task": PayloadSchema(task, meta, at_most=(("rows", "seen"),)),
    }


def dims(hparams: PiloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, the rank r, the classes of the task, seen ones and those still to come."""
    return {
        "d": backbone.dim,
        "r": hparams.rank,
        "c": len(task.classes),
        "seen": len(task.seen),
        "future": max((hparams.total_classes or 0) - len(task.seen), 0),
    }


def _lora(hparams: PiloraHparams, backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    check_blocks("pilora", hparams.blocks, backbone)
    return lora_specs(lora_names(lora_places(hparams.blocks)), backbone)


def _half(name: str) -> str:
    return f"fcil_adapters.methods.pilora.{name}"


METHOD = Method(
    name="pilora",
    version="2",
    title="PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning",
    citation="H. Guo, F. Zhu, W. Liu, X.-Y. Zhang, C.-L. Liu. ECCV 2024. "
    "https://arxiv.org/abs/2401.02094",
    hparams=PiloraHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner=_half("learner:Learner"),
    aggregator=_half("aggregator:Aggregator"),
    model=_half("model:Model"),
    changes=_half("composition:weight_changes"),
    starts=lambda _h: "each of its tasks trains a LoRA of its own",
    presets=PRESETS,
    cadence={"current": Cadence.OPENING, "task": Cadence.OWN},
    averagings=every_rule,
    statistics=prototype_statistics,
    half=(Kind.LORA, Kind.PROTOTYPE),
    claim=Claim(
        said="0.04 % of a ViT-B's parameters are stored for each task",
        up_bytes=None,
        down_bytes=None,
        leaves_out="traffic is not reported",
    ),
    economies=ECONOMIES,
)
