"""FedCLM: LoRA and a head trained by cross-entropy, then the nearest class mean.

As Guo et al. define it in one sentence, as a baseline of PILoRA: Federated Class-Incremental
Learning via Prototype Guided LoRA. ECCV 2024. https://arxiv.org/abs/2401.02094

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    PayloadSchema,
    Statistic,
    TaskInfo,
)
from fcil_adapters.methods.fedclm.options import FedclmHparams
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.toolkit.lora.class_means import (
    MEANS,
    means_exchange,
    means_schemas,
    means_statistics,
)
from fcil_adapters.toolkit.lora.manifest import (
    broadcast_schemas,
    lora_method,
    lora_statistics,
    train_exchange,
)

NAME = "fedclm"


def exchanges(h: FedclmHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds, and one for the class means of the trained model."""
    return train_exchange(NAME, h, backbone, averaged=True), means_exchange(h.min_count_upload)


def broadcast(h: FedclmHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part and of each task's means."""
    return {**broadcast_schemas(NAME, h, backbone), **means_schemas()}


def statistics(h: FedclmHparams, kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all class means."""
    return lora_statistics(h, kind, task) + means_statistics(kind)


METHOD = lora_method(
    NAME,
    "FedCLM: cross-entropy in training, nearest class mean at inference",
    "H. Guo, F. Zhu, W. Liu, X.-Y. Zhang, C.-L. Liu. ECCV 2024. https://arxiv.org/abs/2401.02094",
    FedclmHparams,
    learner="fcil_adapters.methods.fedclm.learner:Learner",
    aggregator="fcil_adapters.methods.fedclm.aggregator:Aggregator",
    model="fcil_adapters.methods.fedclm.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    statistics=statistics,
    cadence={CURRENT: Cadence.LEARNED, MEANS: Cadence.CLOSED},
)
