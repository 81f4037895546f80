"""FedAvg-Prompt: prompts and a linear head, trained on clients and averaged.

A baseline of Halbe, Smith, Tian, Kira. Continual Adaptation of Vision Transformers for Federated
Learning. TMLR 2024, https://arxiv.org/abs/2306.09970: their client, and no repair on the server.

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md gives the choices and their
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import BackboneInfo, Exchange, TaskInfo
from fcil_adapters.contract.traffic import Claim
from fcil_adapters.methods.fedavg_prompt.options import ECONOMIES, PRESETS, FedAvgPromptHparams
from fcil_adapters.toolkit.prompts.manifest import (
    POOL_CADENCE,
    head_schemas,
    pool_schema,
    prompt_method,
    sizes,
    train_exchange,
)
from fcil_adapters.toolkit.prompts.parts import pool_names
from fcil_protocol.payloads.schema import PayloadSchema


def exchanges(hparams: FedAvgPromptHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, ``train``.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("fedavg_prompt", hparams.blocks, backbone)
    return train_exchange(pool_names(hparams.blocks), "M")


def broadcast(hparams: FedAvgPromptHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the head's rows, task by task, and of the pools.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("fedavg_prompt", hparams.blocks, backbone)
    return {**head_schemas(), **pool_schema(pool_names(hparams.blocks))}


def dims(hparams: FedAvgPromptHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return pool size M, prompt length L, width d, and the task's and past classes."""
    return sizes({"M": hparams.pool_size}, hparams.prompt_length, backbone.dim, task)


METHOD = prompt_method(
    name="fedavg_prompt",
    title="FedAvg-Prompt: averaged pools of prompts (a baseline of HePCo)",
    citation="S. Halbe, J. S. Smith, J. Tian, Z. Kira. TMLR 2024. https://arxiv.org/abs/2306.09970",
    hparams=FedAvgPromptHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    presets=PRESETS,
    cadence=POOL_CADENCE,
    claim=Claim(
        said="31.37 MB in each exchange (MiB; HePCo's paper)",
        up_bytes=32_894_000,
        down_bytes=32_894_000,
        leaves_out="nothing but the counts of each class, which say who has been seen",
    ),
    economies=ECONOMIES,
)
