"""Fed-TaLoRA: task-agnostic low-rank residual adaptation.

Feng Yu, Jia Hu, Geyong Min: Efficient Federated Class-Incremental Learning of Pre-Trained Models
via Task-agnostic Low-rank Residual Adaptation. 2025. https://arxiv.org/abs/2505.12318

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md leads from the equations to the
functions, with every deviation.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    AveragingRule,
    BackboneInfo,
    Cadence,
    Claim,
    Exchange,
    Kind,
    MetaSpec,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
    mean_only,
)
from fcil_adapters.methods.fed_talora.options import ECONOMIES, PRESETS, FedTaloraHparams
from fcil_adapters.methods.fed_talora.traffic import largest
from fcil_adapters.toolkit.lora.manifest import (
    TASK_META,
    broadcast_schemas,
    lora_averagings,
    lora_dims,
    lora_method,
    places,
    train_exchange,
)
from fcil_adapters.toolkit.lora.tensors import module_of, module_shape

NAME = "fed_talora"
_VERSION = MetaSpec("version", "int")


def exchanges(hparams: FedTaloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the one exchange of a task, its training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    return (train_exchange(NAME, hparams, backbone, meta=(_VERSION,)),)


def broadcast(hparams: FedTaloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the shared parts, of residuals and of their dense base."""
    meta = (*TASK_META, _VERSION, MetaSpec("base", "int"))
    kinds = broadcast_schemas(NAME, hparams, backbone, meta=meta)
    return kinds | _residual_schemas(hparams, backbone) if hparams.corrects else kinds


def dims(hparams: FedTaloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the sizes of `lora.manifest` and the largest rank of a residual."""
    largest_rank = min(backbone.dim, backbone.mlp_dim)
    return {**lora_dims(hparams, backbone, task), "max_rank": largest_rank}


def averagings(hparams: FedTaloraHparams) -> tuple[AveragingRule, ...]:
    """Return the rules of averaging that it can work with.

    The residual repairs the loss of the plain mean (Eq. 4); with another average it would put the
    outliers back.
    """
    return mean_only(hparams) if hparams.corrects else lora_averagings(hparams)


def _residual_schemas(
    hparams: FedTaloraHparams, backbone: BackboneInfo
) -> dict[str, PayloadSchema]:
    """Return the schemas of residuals: each matrix has its own rank, up to the smaller side."""
    factors, dense, bounds = [], [], []
    for place in places(hparams):
        out, width = module_shape(module_of(place), backbone)
        rank = f"rank.{place}"
        factors.append(TensorSpec(f"{place}.L", Kind.RESIDUAL, (out, rank)))
        factors.append(TensorSpec(f"{place}.R", Kind.RESIDUAL, (rank, width)))
        dense.append(TensorSpec(place, Kind.RESIDUAL, (out, width)))
        bounds.append((rank, "max_rank"))
    meta = (_VERSION,)
    return {
        "residual": PayloadSchema(tuple(factors), meta, at_most=tuple(bounds)),
        "base": PayloadSchema(tuple(dense), meta),
    }


METHOD = lora_method(
    NAME,
    "Fed-TaLoRA: Federated Task-agnostic Low-rank Residual Adaptation",
    "F. Yu, J. Hu, G. Min. 2025. https://arxiv.org/abs/2505.12318",
    FedTaloraHparams,
    learner="fcil_adapters.methods.fed_talora.learner:Learner",
    aggregator="fcil_adapters.methods.fed_talora.aggregator:Aggregator",
    model="fcil_adapters.methods.fed_talora.model:Model",
    changes="fcil_adapters.methods.fed_talora.parts:weight_changes",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    presets=PRESETS,
    cadence={"fixed": Cadence.RUN, "residual": Cadence.LOG, "base": Cadence.BASE},
    largest=largest,
    averagings=averagings,
    claim=Claim(
        said="0.36 million parameters a round",
        up_bytes=718_888,
        down_bytes=718_888,
        leaves_out="the downloaded residual",
    ),
    economies=ECONOMIES,
)
