"""CODA-Prompt with FedAvg: each task adds prompt components, weighted by attention and keys.

James Seale Smith, Leonid Karlinsky, Vyshnavi Gutta, Paola Cascante-Bonilla, Donghyun Kim, Assaf
Arbelle, Rameswar Panda, Rogerio Feris, Zsolt Kira. CODA-Prompt: COntinual Decomposed
Attention-based Prompting for Rehearsal-Free Continual Learning. CVPR 2023,
https://arxiv.org/abs/2211.13218, code: https://github.com/GT-RIPL/CODA-Prompt

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md gives the choices and their
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import BackboneInfo, Claim, Exchange, PayloadSchema, TaskInfo
from fcil_adapters.methods.coda_prompt.options import ECONOMIES, PRESETS
from fcil_adapters.toolkit.prompts.manifest import (
    PROMPT_CADENCE,
    head_schemas,
    prompt_method,
    prompts_schema,
    sizes,
    train_exchange,
)
from fcil_adapters.toolkit.prompts.options import ComponentHparams
from fcil_adapters.toolkit.prompts.parts import component_names


def exchanges(hparams: ComponentHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, ``train``.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("coda_prompt", hparams.blocks, backbone)
    return train_exchange(component_names(hparams.blocks), "m", hparams.average, averaged=True)


def broadcast(hparams: ComponentHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the head's rows, task by task, and of a task's components.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("coda_prompt", hparams.blocks, backbone)
    return {**head_schemas(), **prompts_schema(component_names(hparams.blocks))}


def dims(hparams: ComponentHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return components m, their length L, width d, and the task's and past classes."""
    return sizes({"m": hparams.components}, hparams.length, backbone.dim, task)


METHOD = prompt_method(
    name="coda_prompt",
    title="CODA-Prompt with FedAvg: prompt components with attention, added by each task",
    citation="J. S. Smith et al. CVPR 2023. https://arxiv.org/abs/2211.13218",
    hparams=ComponentHparams,
    learner="fcil_adapters.methods.coda_prompt.learner:Learner",
    aggregator="fcil_adapters.methods.coda_prompt.aggregator:Aggregator",
    model="fcil_adapters.toolkit.prompts.halves:ComponentModel",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    presets=PRESETS,
    cadence=PROMPT_CADENCE,
    claim=Claim(
        said="0.3 MB (HGP's paper)",
        up_bytes=337_960,
        down_bytes=None,
        leaves_out="four of the five layers' components",
    ),
    economies=ECONOMIES,
)
