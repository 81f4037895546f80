"""EWC+FL: elastic weight consolidation of LoRA, with federated averages.

James Kirkpatrick, Razvan Pascanu, Neil Rabinowitz, Joel Veness et al.: Overcoming catastrophic
forgetting in neural networks. PNAS 2017. https://arxiv.org/abs/1612.00796

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    Additive,
    BackboneInfo,
    Cadence,
    Exchange,
    Kind,
    Largest,
    Payload,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
)
from fcil_adapters.methods.ewc.options import EwcHparams
from fcil_adapters.methods.ewc.parts import IMPORTANCE, LARGEST, fisher_name
from fcil_adapters.numerics.class_reports import count_faults, tally_specs
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.numerics.weighted_sums import Weight, weighted_sums
from fcil_adapters.toolkit.lora.manifest import (
    SHORT,
    broadcast_schemas,
    lora_largest,
    lora_method,
    train_exchange,
    trained_names,
)
from fcil_adapters.toolkit.lora.tensors import lora_specs


def exchanges(h: EwcHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds, and one in which clients send their Fisher information."""
    told = PayloadSchema((*_fisher_specs(h, backbone), *tally_specs()))
    return (
        train_exchange("ewc", h, backbone, averaged=True),
        Exchange("finish", told, rounds=1, check=_faults, additive=_fisher_sums(h, backbone)),
    )


def broadcast(h: EwcHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the parts of `lora.manifest` and the importance; the teacher's LoRA is theta*."""
    return {
        **broadcast_schemas("ewc", h, backbone),
        IMPORTANCE: PayloadSchema(_fisher_specs(h, backbone)),
    }


def largest(h: EwcHparams, backbone: BackboneInfo, task: TaskInfo, clients: int) -> Largest:
    """Return the largest traffic; the first task has neither a teacher nor an importance."""
    room = lora_largest(h, backbone, task, clients)
    without = () if task.past else (IMPORTANCE,)
    return Largest(room.sizes, room.without_tensors, (*room.without_parts, *without))


def _faults(payload: Payload, task: TaskInfo) -> list[str]:
    """Return how an upload contradicts the task; a negative importance would push away."""
    measured = [name for name in payload.tensors if name.startswith("fisher.")]
    negative = [name for name in measured if (payload.f32(name) < 0).any()]
    return [
        *count_faults(payload, task),
        *(f"{name!r} holds a negative number" for name in negative),
    ]


def _fisher_sums(h: EwcHparams, backbone: BackboneInfo) -> Additive:
    """Return the sums of uploads of Fisher information."""
    weight: Weight = "images" if h.weights == "samples" else "clients"
    return weighted_sums((spec, weight) for spec in _fisher_specs(h, backbone))


def _fisher_specs(h: EwcHparams, backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(fisher_name(spec.name), Kind.IMPORTANCE, spec.shape, max_abs=LARGEST)
        for spec in lora_specs(trained_names(h), backbone)
    )


METHOD = lora_method(
    "ewc",
    "EWC+FL: elastic weight consolidation, on LoRA",
    "J. Kirkpatrick, R. Pascanu, N. Rabinowitz, J. Veness et al. PNAS 2017. "
    "https://arxiv.org/abs/1612.00796",
    EwcHparams,
    learner="fcil_adapters.methods.ewc.learner:Learner",
    aggregator="fcil_adapters.methods.ewc.aggregator:Aggregator",
    exchanges=exchanges,
    broadcast=broadcast,
    largest=largest,
    presets={"short": {**SHORT, "ewc_lambda": 1e4}},
    cadence={CURRENT: Cadence.LEARNED, IMPORTANCE: Cadence.OPENING},
)
