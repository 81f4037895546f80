"""L2P with FedAvg: the prompts of a pool nearest to an image precede its tokens.

Zifeng Wang, Zizhao Zhang, Chen-Yu Lee, Han Zhang, Ruoxi Sun, Xiaoqi Ren, Guolong Su, Vincent Perot,
Jennifer Dy, Tomas Pfister. Learning to Prompt for Continual Learning. CVPR 2022,
https://arxiv.org/abs/2112.08654, code: https://github.com/google-research/l2p

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md gives the choices and their
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import BackboneInfo, Claim, Exchange, PayloadSchema, TaskInfo
from fcil_adapters.methods.l2p.options import ECONOMIES, NAMES, PRESETS, L2pHparams
from fcil_adapters.toolkit.prompts.manifest import (
    POOL_CADENCE,
    head_schemas,
    pool_schema,
    prompt_method,
    sizes,
    train_exchange,
)


def exchanges(hparams: L2pHparams, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, ``train``."""
    return train_exchange(NAMES, "M", hparams.average, averaged=True)


def broadcast(_hparams: L2pHparams, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the head's rows, task by task, and of the pool."""
    return {**head_schemas(), **pool_schema(NAMES)}


def dims(hparams: L2pHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return pool size M, prompt length L, width d, and the task's and past classes."""
    return sizes({"M": hparams.pool_size}, hparams.length, backbone.dim, task)


METHOD = prompt_method(
    name="l2p",
    title="L2P with FedAvg: the nearest prompts of a pool lead an image's tokens",
    citation="Z. Wang et al. CVPR 2022. https://arxiv.org/abs/2112.08654",
    hparams=L2pHparams,
    learner="fcil_adapters.methods.l2p.learner:Learner",
    aggregator="fcil_adapters.methods.l2p.aggregator:Aggregator",
    model="fcil_adapters.methods.l2p.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    presets=PRESETS,
    cadence=POOL_CADENCE,
    claim=Claim(
        said="0.2 MB (HGP's paper)",
        up_bytes=215_080,
        down_bytes=None,
        leaves_out="the counts of each class, which show the classes seen so far",
    ),
    economies=ECONOMIES,
)
