"""Pieces of prompt methods' manifests: schemas, cadences, protected statistics (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Economy,
    Exchange,
    Hparams,
    Kind,
    MetaSpec,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    every_rule,
)
from fcil_adapters.numerics.class_reports import count_faults, tally_specs
from fcil_adapters.numerics.weighted_sums import Weight, weighted_sums
from fcil_adapters.toolkit.heads.rows import head_specs, row_specs
from fcil_adapters.toolkit.prompts.options import ComponentHparams, PoolHparams
from fcil_adapters.toolkit.prompts.parts import POOLS, PROMPTS, component_names, pool_names

TRAINED_KINDS = (Kind.PROMPT, Kind.KEY, Kind.HEAD)  # committed by an aggregator
POOL_CADENCE = {POOLS: Cadence.TRAINED, "task": Cadence.TASK}
PROMPT_CADENCE = {PROMPTS: Cadence.OWN, "task": Cadence.TASK}

# Few rounds on a small backbone (docs/methods/README.md, "Short schedules").
POOL_SHORT: Mapping[str, Any] = {
    "pixels": "normalised",
    "pool_size": 20,
    "prompt_length": 8,
    "epochs": 3,
    "batch_size": 16,
    "lr": 1e-2,
}
POOL_ECONOMIES = (
    Economy("50 prompts in a pool", "prompts", {"pool_size": 50}),
    Economy("20 prompts in a pool", "prompts", {"pool_size": 20}),
    Economy("8 rows in a prompt", "most of a prompt's length", {"prompt_length": 8}),
)
_COMPONENT_ECONOMIES = (
    Economy("5 components a task", "half of the components", {"components": 5}),
    Economy("4 rows in a component", "half of a prompt's length", {"length": 4}),
    Economy("components in one block", "four of five blocks", {"blocks": (0,)}),
)

_TASK = (MetaSpec("task", "int"),)
_HALVES = "fcil_adapters.toolkit.prompts.halves"


def prompt_specs(names: Iterable[str], rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of prompts (rows, L, d) and of keys (rows, d), by the names' prefix."""
    return tuple(
        TensorSpec(name, Kind.PROMPT, (rows, "L", "d"))
        if name.startswith("prompt.")
        else TensorSpec(name, Kind.KEY, (rows, "d"))
        for name in names
    )


def train_exchange(
    names: Iterable[str], rows: str, average: str, *, averaged: bool = False
) -> tuple[Exchange, ...]:
    """Return the only exchange of a task: prompts, the task's head rows, image counts.

    Args:
        names: of prompts and keys.
        rows: the symbol of their number.
        average: weights of the clients (`options.PromptHparams.average`).
        averaged: True if the aggregator averages as `server.averaged` does, and has
            `server.start_of` as its ``start``.
    """
    trained = (*prompt_specs(names, rows), *head_specs("c"))
    schema = PayloadSchema((*trained, *tally_specs()))
    usual: Weight = "images" if average == "samples" else "clients"
    sums = weighted_sums((spec, usual) for spec in trained)
    additive = sums if averaged else None
    return (Exchange("train", schema, check=count_faults, averaged=averaged, additive=additive),)


def head_schemas() -> dict[str, PayloadSchema]:
    """Return the schemas of `parts.head_parts`."""
    return {
        "current": PayloadSchema(row_specs("c"), _TASK),
        "task": PayloadSchema(row_specs("rows"), _TASK, (("rows", "past"),)),
    }


def pool_schema(names: Iterable[str]) -> dict[str, PayloadSchema]:
    """Return the schema of `parts.pool_part`."""
    return {POOLS: PayloadSchema(prompt_specs(names, "M"))}


def component_schemas(
    name: str, h: ComponentHparams, backbone: BackboneInfo
) -> dict[str, PayloadSchema]:
    """Return the schemas of the head's rows, task by task, and of a task's components.

    Raises:
        ConfigError: ``blocks`` of the method ``name`` has one that the backbone lacks.
    """
    check_blocks(name, h.blocks, backbone)
    specs = prompt_specs(component_names(h.blocks), "m")
    return {**head_schemas(), PROMPTS: PayloadSchema(specs, _TASK)}


def sizes(rows: Mapping[str, int], length: int, d: int, task: TaskInfo) -> dict[str, int]:
    """Return the values of the schemas' known symbols: prompts ``M`` or ``m``, and the rest."""
    return {**rows, "L": length, "d": d, "c": len(task.classes), "past": len(task.past)}


def lone_class_statistics(_hparams: Any, _kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistic: in a task of one class, the mean feature as head row."""
    return (Statistic("class means", ("head.weight",)),) if len(task.classes) == 1 else ()


def prompt_method(
    name: str,
    title: str,
    citation: str,
    hparams: type[Hparams],
    *,
    learner: str,
    aggregator: str,
    model: str,
    **more: Any,
) -> Method:
    """Return the manifest of a method.

    Args:
        name: the method's.
        title: for people.
        citation: of its paper.
        hparams: its options.
        learner: ``package.module:Class``; some halves are in `prompts.halves`.
        aggregator: likewise.
        model: likewise.
        more: fields of `Method` that are its own, or differ.
    """
    common: dict[str, Any] = {
        "version": "1",
        "averagings": every_rule,
        "statistics": lone_class_statistics,
        "half": TRAINED_KINDS,
    }
    return Method(
        name=name, title=title, citation=citation, hparams=hparams,
        learner=learner, aggregator=aggregator, model=model, **(common | more),
    )  # fmt: skip


def pool_method(
    name: str,
    title: str,
    citation: str,
    hparams: type[PoolHparams],
    *,
    learner: str = f"{_HALVES}:PoolLearner",
    **more: Any,
) -> Method:
    """Return the manifest of a method with one pool of prompts in each block for all tasks.

    Args:
        name: the method's.
        title: for people.
        citation: of its paper.
        hparams: its options.
        learner: ``package.module:Class`` of its own; by default cross-entropy alone.
        more: fields of `Method` that are its own, or differ.
    """

    def exchanges(h: PoolHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
        check_blocks(name, h.blocks, backbone)
        names, averaged = pool_names(h.blocks), "aggregator" not in more
        return train_exchange(names, "M", h.average, averaged=averaged)

    def broadcast(h: PoolHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
        check_blocks(name, h.blocks, backbone)
        return {**head_schemas(), **pool_schema(pool_names(h.blocks))}

    def dims(h: PoolHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
        return sizes({"M": h.pool_size}, h.prompt_length, backbone.dim, task)

    common: dict[str, Any] = {
        "aggregator": f"{_HALVES}:PoolAggregator",
        "model": f"{_HALVES}:PoolModel",
        "exchanges": exchanges,
        "broadcast": broadcast,
        "dims": dims,
        "presets": {"short": POOL_SHORT},
        "cadence": POOL_CADENCE,
        "economies": POOL_ECONOMIES,
    }
    return prompt_method(name, title, citation, hparams, learner=learner, **(common | more))


def component_method(
    name: str,
    title: str,
    citation: str,
    hparams: type[ComponentHparams],
    *,
    learner: str,
    **more: Any,
) -> Method:
    """Return the manifest of a method whose tasks each add components to some blocks.

    Args:
        name: the method's.
        title: for people.
        citation: of its paper.
        hparams: its options.
        learner: ``package.module:Class``.
        more: fields of `Method` that are its own, or differ.
    """

    def exchanges(h: ComponentHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
        check_blocks(name, h.blocks, backbone)
        return train_exchange(component_names(h.blocks), "m", h.average, averaged=True)

    def broadcast(h: ComponentHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
        return component_schemas(name, h, backbone)

    def dims(h: ComponentHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
        return sizes({"m": h.components}, h.length, backbone.dim, task)

    common: dict[str, Any] = {
        "aggregator": f"{_HALVES}:ComponentAggregator",
        "model": f"{_HALVES}:ComponentModel",
        "exchanges": exchanges,
        "broadcast": broadcast,
        "dims": dims,
        "cadence": PROMPT_CADENCE,
        "economies": _COMPONENT_ECONOMIES,
    }
    return prompt_method(name, title, citation, hparams, learner=learner, **(common | more))
