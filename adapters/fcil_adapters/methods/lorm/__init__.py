"""LoRM: federated LoRA whose factors are trained in turns and merged in closed form.

Riccardo Salami, Pietro Buzzega, Matteo Mosconi, Jacopo Bonato, Luigi Sabetta, Simone Calderara:
Closed-form merging of parameter-efficient modules for Federated Continual Learning. ICLR 2025.
https://arxiv.org/abs/2410.17961

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Largest,
    Payload,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
    mean_only,
)
from fcil_adapters.methods.lorm.options import ECONOMIES, PRESETS, LormHparams
from fcil_adapters.methods.lorm.parts import (
    GRAM,
    HEAD_ROOT,
    IMAGES,
    LORA,
    root_name,
    root_names,
    root_specs,
)
from fcil_adapters.numerics.class_reports import count_faults, count_spec, tally_specs
from fcil_adapters.numerics.symmetric import triangle_size
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.toolkit.lora.manifest import (
    broadcast_schemas,
    factor_names,
    lora_dims,
    lora_largest,
    lora_method,
    round_factors,
    train_exchange,
)
from fcil_adapters.toolkit.lora.tensors import lora_of, lora_specs

NAME = "lorm"


def exchanges(h: LormHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds, and one in which clients describe the inputs of the layers.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    # No sums, although the merge needs no more (`merging.RegMean`): the inputs of the first block
    # do not depend on what is trained, so each round would send the same products, and of two sums
    # that differ by one client the difference is that client's.
    train = train_exchange(NAME, h, backbone, more=_roots(h, backbone), check=_root_faults)
    if h.task_merge == "mean":
        return (train,)
    told = PayloadSchema((*root_specs(root_names(h, "A"), backbone), *tally_specs()))
    return (train, Exchange("finish", told, rounds=1, check=count_faults))


def _roots(h: LormHparams, backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    """Return the specs of the roots in a training round's upload."""
    factors = round_factors(h)
    names = [name for factor in factors for name in root_names(h, factor)]
    places = root_specs(names, backbone, optional=len(factors) > 1)
    return (*places, *root_specs((HEAD_ROOT,), backbone))


def _root_faults(payload: Payload, _task: TaskInfo) -> list[str]:
    """Return a sentence if the roots are not those of the LoRA tensors beside them."""
    expected = {HEAD_ROOT, *(root_name(name) for name in lora_of(payload))}
    got = {name for name in payload.tensors if name.startswith("root.")}
    return [] if got == expected else ["roots: expected one for each LoRA tensor, and the head's"]


def broadcast(h: LormHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the shared parts, the LoRA of a finished task, and the inputs of a task's layers."""
    kinds = broadcast_schemas(NAME, h, backbone)
    kinds[LORA] = PayloadSchema(lora_specs(factor_names(h), backbone))
    if h.task_merge == "regmean":
        squares = root_specs(root_names(h, "A"), backbone)
        kinds[GRAM] = PayloadSchema((*squares, count_spec(IMAGES, 1)))
    return kinds


def dims(h: LormHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the sizes of `lora.manifest`, and of the roots' triangles."""
    triangles = {"d_triangle": triangle_size(backbone.dim), "r_triangle": triangle_size(h.rank)}
    return {**lora_dims(h, backbone, task), **triangles}


def largest(h: LormHparams, backbone: BackboneInfo, task: TaskInfo, clients: int) -> Largest:
    """Return the largest traffic: that of the rounds with the larger factor."""
    room = lora_largest(h, backbone, task, clients)
    known = dims(h, backbone, task)

    def size(factor: str) -> int:
        lora = lora_specs(factor_names(h, of=factor), backbone)
        roots = root_specs(root_names(h, factor), backbone)
        return PayloadSchema((*lora, *roots)).max_bytes(known)

    largest_first = sorted(round_factors(h), key=size, reverse=True)
    smaller = [n for f in largest_first[1:] for n in (*factor_names(h, of=f), *root_names(h, f))]
    alone = (LORA, GRAM) if h.single_column(task) else ()
    return Largest(room.sizes, (*room.without_tensors, *smaller), (*room.without_parts, *alone))


METHOD = lora_method(
    NAME,
    "LoRM: closed-form merging of LoRA trained in turns",
    "R. Salami, P. Buzzega, M. Mosconi, J. Bonato, L. Sabetta, S. Calderara. ICLR 2025. "
    "https://arxiv.org/abs/2410.17961",
    LormHparams,
    learner="fcil_adapters.methods.lorm.learner:Learner",
    aggregator="fcil_adapters.methods.lorm.aggregator:Aggregator",
    model="fcil_adapters.methods.lorm.model:Model",
    changes="fcil_adapters.methods.lorm.inputs:weight_changes",
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    largest=largest,
    averagings=mean_only,
    presets=PRESETS,
    cadence={CURRENT: Cadence.LEARNED, LORA: Cadence.TASK, GRAM: Cadence.CLOSED},
    economies=ECONOMIES,
)
