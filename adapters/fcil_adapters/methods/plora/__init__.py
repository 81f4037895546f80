"""PLoRA: Federated Class-Incremental Learning with Prototype Guided Transformer.

Haiyang Guo, Fei Zhu, Wenzhuo Liu, Xu-Yao Zhang, Cheng-Lin Liu. 2024.
https://arxiv.org/abs/2401.02094v1 (the first version of what became PILoRA)

Manifest (no torch): hyper-parameters, exchanges, schemas. The way from the equations to the
functions, and every deviation, is in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fcil_adapters.class_reports import REPORT_AT_MOST, count_spec, report_faults, report_specs
from fcil_adapters.contract import BackboneInfo, Exchange, Method, TaskInfo
from fcil_adapters.methods.plora.options import PRESETS, PloraHparams
from fcil_adapters.methods.plora.parts import lora_names
from fcil_protocol.errors import ConfigError
from fcil_protocol.schema import Kind, MetaSpec, PayloadSchema, TensorSpec


def exchanges(hparams: PloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the exchanges of a task: class means first (if used), then the training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    _check_blocks(hparams, backbone)
    check = partial(report_faults, hparams.min_count_upload)
    trained = (*_lora_specs(hparams), _prototypes("c"), *report_specs())
    train = Exchange("train", PayloadSchema(trained, at_most=REPORT_AT_MOST), check=check)
    if hparams.init != "class_means":
        return (train,)
    report = PayloadSchema(report_specs(), at_most=REPORT_AT_MOST)
    return (Exchange("prepare", report, rounds=1, check=check), train)


def broadcast(hparams: PloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part, a finished task's part and the teacher's part."""
    _check_blocks(hparams, backbone)
    meta = (MetaSpec("task", "int"),)
    lora = _lora_specs(hparams)
    kinds = {
        "current": PayloadSchema((*lora, *_row_specs("c")), meta),
        "task": PayloadSchema(_row_specs("rows"), meta, at_most=(("rows", "past"),)),
    }
    if hparams.gamma_kd > 0:
        kinds["teacher"] = PayloadSchema(lora, meta)
    return kinds


def dims(hparams: PloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, the rank r, the task's classes c and the past classes."""
    return {
        "d": backbone.dim,
        "r": hparams.rank,
        "c": len(task.classes),
        "past": len(task.past),
    }


def _check_blocks(hparams: PloraHparams, backbone: BackboneInfo) -> None:
    beyond = [b for b in hparams.blocks if b >= backbone.depth]
    if beyond:
        raise ConfigError(
            f"option 'blocks' of method plora: block {beyond[0]} does not exist; the backbone "
            f"{backbone.name} has the blocks 0 to {backbone.depth - 1}.",
            action="Name existing blocks.",
        )


def _lora_specs(hparams: PloraHparams) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, Kind.LORA, ("r", "d") if name.endswith("A") else ("d", "r"))
        for name in lora_names(hparams.blocks)
    )


def _prototypes(rows: str) -> TensorSpec:
    return TensorSpec("proto", Kind.PROTOTYPE, (rows, "d"))


def _row_specs(rows: str) -> tuple[TensorSpec, ...]:
    return (_prototypes(rows), count_spec("classes", rows), count_spec("seen", rows))


def _half(name: str) -> str:
    return f"fcil_adapters.methods.plora.{name}"


METHOD = Method(
    name="plora",
    version="1",
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
    presets=PRESETS,
)
