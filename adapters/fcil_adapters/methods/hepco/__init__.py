"""HePCo: Continual Adaptation of Vision Transformers for Federated Learning.

Shaunak Halbe, James Seale Smith, Junjiao Tian, Zsolt Kira. TMLR 2024,
https://openreview.net/forum?id=vsZ5A3Zxyr, https://arxiv.org/abs/2306.09970,
code: https://github.com/shaunak27/hepco-fed

Manifest (no torch): hyper-parameters, exchanges, schemas. The way from the equations to the
functions, and every deviation, is in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Claim,
    Exchange,
    MetaSpec,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
)
from fcil_adapters.methods.hepco.options import ECONOMIES, PRESETS, HepcoHparams
from fcil_adapters.methods.hepco.parts import check_upload
from fcil_adapters.numerics.class_reports import count_spec
from fcil_adapters.toolkit.heads.rows import head_specs
from fcil_adapters.toolkit.prompts.manifest import (
    pool_schema,
    prompt_method,
    prompt_specs,
)
from fcil_adapters.toolkit.prompts.parts import POOLS, pool_names


def exchanges(hparams: HepcoHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, ``train``.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("hepco", hparams.blocks, backbone)
    count = replace(count_spec("count", "c"), optional=True)  # not in the paper
    facts = (count_spec("classes", "c"), count, count_spec("n", 1))
    names = pool_names(hparams.blocks)
    schema = PayloadSchema((*prompt_specs(names, "M"), *head_specs("c"), *facts))
    return (Exchange("train", schema, check=check_upload),)


def broadcast(hparams: HepcoHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the head, of the pools, and of the classes of a finished task.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("hepco", hparams.blocks, backbone)
    meta = (MetaSpec("task", "int"),)
    return {
        "current": PayloadSchema((*head_specs("all"), *_flags("c")), meta),
        **pool_schema(pool_names(hparams.blocks)),
        "task": PayloadSchema(_flags("rows"), meta, (("rows", "past"),)),
    }


def dims(hparams: HepcoHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, pool size M, prompt length L, and the task's, past and all classes."""
    return {
        "d": backbone.dim,
        "M": hparams.pool_size,
        "L": hparams.prompt_length,
        "c": len(task.classes),
        "past": len(task.past),
        "all": len(task.seen),
    }


def _flags(rows: str) -> tuple[TensorSpec, ...]:
    return count_spec("classes", rows), count_spec("seen", rows)


METHOD = prompt_method(
    name="hepco",
    version="2",
    title="HePCo: Continual Adaptation of Vision Transformers for Federated Learning",
    citation="S. Halbe, J. S. Smith, J. Tian, Z. Kira. TMLR 2024. https://arxiv.org/abs/2306.09970",
    hparams=HepcoHparams,
    learner="fcil_adapters.methods.hepco.learner:Learner",
    aggregator="fcil_adapters.methods.hepco.aggregator:Aggregator",
    model="fcil_adapters.methods.hepco.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    presets=PRESETS,
    cadence={POOLS: Cadence.TRAINED, "task": Cadence.TASK},
    claim=Claim(
        said="31.37 MB in each exchange (MiB)",
        up_bytes=32_894_000,
        down_bytes=32_894_000,
        leaves_out="the counts of each class",
    ),
    economies=ECONOMIES,
)
