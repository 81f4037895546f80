"""Pieces of prompt methods' manifests: schemas, cadences, protected statistics (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fcil_adapters.contract import Exchange, Hparams, Method, TaskInfo
from fcil_adapters.contract.averaging import every_rule
from fcil_adapters.contract.privacy import Statistic
from fcil_adapters.contract.traffic import Cadence
from fcil_adapters.numerics.class_reports import count_faults, count_spec
from fcil_adapters.toolkit.prompts.parts import POOLS, PROMPTS
from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

TRAINED_KINDS = (Kind.PROMPT, Kind.KEY, Kind.HEAD)  # committed by an aggregator
POOL_CADENCE = {POOLS: Cadence.TRAINED, "task": Cadence.TASK}
PROMPT_CADENCE = {PROMPTS: Cadence.OWN, "task": Cadence.TASK}

_TASK = (MetaSpec("task", "int"),)


def prompt_specs(names: Iterable[str], rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of prompts (rows, L, d) and of keys (rows, d), by the names' prefix."""
    return tuple(
        TensorSpec(name, Kind.PROMPT, (rows, "L", "d"))
        if name.startswith("prompt.")
        else TensorSpec(name, Kind.KEY, (rows, "d"))
        for name in names
    )


def head_specs(rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of a linear head's rows."""
    return (
        TensorSpec("head.weight", Kind.HEAD, (rows, "d")),
        TensorSpec("head.bias", Kind.HEAD, (rows,)),
    )


def train_exchange(names: Iterable[str], rows: str) -> tuple[Exchange, ...]:
    """Return the only exchange of a task: prompts, the task's head rows, image counts."""
    facts = (count_spec("classes", "c"), count_spec("count", "c"), count_spec("n", 1))
    schema = PayloadSchema((*prompt_specs(names, rows), *head_specs("c"), *facts))
    return (Exchange("train", schema, check=count_faults),)


def head_schemas() -> dict[str, PayloadSchema]:
    """Return the schemas of `parts.head_parts`."""

    def rows(symbol: str) -> tuple[TensorSpec, ...]:
        return (*head_specs(symbol), count_spec("classes", symbol), count_spec("seen", symbol))

    return {
        "current": PayloadSchema(rows("c"), _TASK),
        "task": PayloadSchema(rows("rows"), _TASK, (("rows", "past"),)),
    }


def pool_schema(names: Iterable[str]) -> dict[str, PayloadSchema]:
    """Return the schema of `parts.pool_part`."""
    return {POOLS: PayloadSchema(prompt_specs(names, "M"))}


def prompts_schema(names: Iterable[str]) -> dict[str, PayloadSchema]:
    """Return the schema of `parts.prompt_parts`."""
    return {PROMPTS: PayloadSchema(prompt_specs(names, "m"), _TASK)}


def sizes(rows: Mapping[str, int], length: int, d: int, task: TaskInfo) -> dict[str, int]:
    """Return the values of the schemas' known symbols: prompts ``M`` or ``m``, and the rest."""
    return {**rows, "L": length, "d": d, "c": len(task.classes), "past": len(task.past)}


def lone_class_statistics(_hparams: Any, _kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistic: in a task of one class, the mean feature as head row."""
    return (Statistic("class means", ("head.weight",)),) if len(task.classes) == 1 else ()


def prompt_method(
    name: str, title: str, citation: str, hparams: type[Hparams], **more: Any
) -> Method:
    """Return the manifest of a method in the folder ``methods/<name>``.

    Args:
        name: the method's.
        title: for people.
        citation: of its paper.
        hparams: its options.
        more: fields of `Method` that are its own, or differ.
    """
    common: dict[str, Any] = {
        "version": "1",
        "averagings": every_rule,
        "statistics": lone_class_statistics,
        "half": TRAINED_KINDS,
        **{
            half: f"fcil_adapters.methods.{name}.{half}:{half.capitalize()}"
            for half in ("learner", "aggregator", "model")
        },
    }
    return Method(name=name, title=title, citation=citation, hparams=hparams, **(common | more))
