"""CCVR: FedAvg-LoRA whose head is calibrated with virtual features at the end of each task.

Mi Luo, Fei Chen, Dapeng Hu, Yifan Zhang, Jian Liang, Jiashi Feng: No Fear of Heterogeneity:
Classifier Calibration for Federated Learning with Non-IID Data. NeurIPS 2021.
https://arxiv.org/abs/2106.05001

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Largest,
    PayloadSchema,
    Statistic,
    TaskInfo,
)
from fcil_adapters.methods.ccvr.options import ECONOMIES, PRESETS, CcvrHparams
from fcil_adapters.methods.ccvr.parts import CALIBRATED
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.toolkit.gaussians.discriminant_head import quadratic_specs
from fcil_adapters.toolkit.gaussians.reports import (
    gaussian_dims,
    gaussian_exchange,
    gaussian_largest,
    gaussian_statistics,
)
from fcil_adapters.toolkit.heads.rows import row_specs
from fcil_adapters.toolkit.lora.manifest import (
    broadcast_schemas,
    lora_dims,
    lora_largest,
    lora_method,
    lora_statistics,
    train_exchange,
)

NAME = "ccvr"
_FACTORS = "factors"  # symbol of the covariances' rows; ``rows`` are the head's


def exchanges(h: CcvrHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds, and one for the Gaussians of the trained model."""
    finish = gaussian_exchange(h, "finish", _FACTORS, moments=h.head == "quadratic")
    return train_exchange(NAME, h, backbone, averaged=True), finish


def broadcast(h: CcvrHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part and of the calibrated head."""
    if h.head == "quadratic":
        head = PayloadSchema(quadratic_specs(), at_most=(("known", "seen"),))
    else:
        head = PayloadSchema(row_specs("calibrated"), at_most=(("calibrated", "seen"),))
    return {**broadcast_schemas(NAME, h, backbone), CALIBRATED: head}


def dims(h: CcvrHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the sizes of `lora.manifest` and the Gaussians' bounds."""
    gaussians = {"own_rank": h.own_rank, **gaussian_dims(h, backbone, task)}
    return {**lora_dims(h, backbone, task), **gaussians}


def largest(h: CcvrHparams, backbone: BackboneInfo, task: TaskInfo, clients: int) -> Largest:
    """Return the largest traffic of `lora.manifest` and of the Gaussians."""
    sizes = gaussian_largest(h, task, _FACTORS).sizes
    return replace(lora_largest(h, backbone, task, clients), sizes=sizes)


def statistics(h: CcvrHparams, kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: the Gaussians, and the mean of a lone class."""
    gaussians = gaussian_statistics(h) if kind == "finish" else ()
    return lora_statistics(h, kind, task) + gaussians


METHOD = lora_method(
    NAME,
    "CCVR: classifier calibration with virtual representations",
    "M. Luo, F. Chen, D. Hu, Y. Zhang, J. Liang, J. Feng. NeurIPS 2021. "
    "https://arxiv.org/abs/2106.05001",
    CcvrHparams,
    version="2",
    learner="fcil_adapters.methods.ccvr.learner:Learner",
    aggregator="fcil_adapters.methods.ccvr.aggregator:Aggregator",
    model="fcil_adapters.methods.ccvr.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    largest=largest,
    statistics=statistics,
    presets=PRESETS,
    cadence={CURRENT: Cadence.LEARNED, CALIBRATED: Cadence.FINISHED},
    economies=ECONOMIES,
)
