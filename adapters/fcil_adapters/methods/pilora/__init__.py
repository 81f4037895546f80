"""PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning.

Haiyang Guo, Fei Zhu, Wenzhuo Liu, Xu-Yao Zhang, Cheng-Lin Liu. ECCV 2024.
https://arxiv.org/abs/2401.02094, code: https://github.com/Ghy0501/PILoRA

Manifest (no torch): hyper-parameters, exchanges, schemas. The way from the equations to the
functions, and every deviation, is in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fcil_adapters.contract import BackboneInfo, Exchange, Method, TaskInfo
from fcil_adapters.methods.pilora.options import PRESETS, PiloraHparams
from fcil_adapters.methods.pilora.parts import check_upload, lora_names
from fcil_protocol.errors import ConfigError
from fcil_protocol.schema import Kind, MetaSpec, PayloadSchema, TensorSpec


def exchanges(hparams: PiloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the exchanges of a task: class means first (if used), then the training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    _check_blocks(hparams, backbone)
    check = partial(check_upload, hparams.min_count_upload)
    train = Exchange(
        "train",
        PayloadSchema(
            (*_lora_specs(hparams), _prototypes("proto", "c"), *_statistics()),
            at_most=(("owned", "c"),),
        ),
        check=check,
    )
    if hparams.init != "class_means":
        return (train,)
    prepare = Exchange(
        "prepare", PayloadSchema(_statistics(), at_most=(("owned", "c"),)), rounds=1, check=check
    )
    return (prepare, train)


def broadcast(hparams: PiloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current task's part and of a finished task's part."""
    _check_blocks(hparams, backbone)
    meta = (MetaSpec("task", "int"),)
    future = (_prototypes("future", "future"),) if hparams.candidates == "all" else ()
    return {
        "current": PayloadSchema((*_task_specs(hparams, "c"), *future), meta),
        "task": PayloadSchema(_task_specs(hparams, "rows"), meta, at_most=(("rows", "past"),)),
    }


def dims(hparams: PiloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, the rank r, the task's classes c, past classes and classes still to come."""
    return {
        "d": backbone.dim,
        "r": hparams.rank,
        "c": len(task.classes),
        "past": len(task.past),
        "future": max((hparams.total_classes or 0) - len(task.seen), 0),
    }


def _check_blocks(hparams: PiloraHparams, backbone: BackboneInfo) -> None:
    beyond = [b for b in hparams.blocks if b >= backbone.depth]
    if beyond:
        raise ConfigError(
            f"option 'blocks' of method pilora: block {beyond[0]} does not exist; the backbone "
            f"{backbone.name} has the blocks 0 to {backbone.depth - 1}.",
            action="Name existing blocks.",
        )


def _lora_specs(hparams: PiloraHparams) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, Kind.LORA, ("r", "d") if name.endswith("A") else ("d", "r"))
        for name in lora_names(hparams.blocks)
    )


def _prototypes(name: str, rows: str) -> TensorSpec:
    return TensorSpec(name, Kind.PROTOTYPE, (rows, "d"))


def _counts(name: str, rows: int | str) -> TensorSpec:
    return TensorSpec(name, Kind.COUNT, (rows,), dtype="I64", non_negative=True)


def _statistics() -> tuple[TensorSpec, ...]:
    """Describe what a client tells of its classes; means only of those it owns enough of."""
    return (
        _prototypes("mean", "owned"),
        _counts("owned", "owned"),
        _counts("classes", "c"),
        _counts("count", "c"),
        _counts("n", 1),
    )


def _task_specs(hparams: PiloraHparams, rows: str) -> tuple[TensorSpec, ...]:
    return (
        *_lora_specs(hparams),
        _prototypes("proto", rows),
        _counts("classes", rows),
        _counts("seen", rows),
    )


def _half(name: str) -> str:
    return f"fcil_adapters.methods.pilora.{name}"


METHOD = Method(
    name="pilora",
    version="1",
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
    presets=PRESETS,
)
