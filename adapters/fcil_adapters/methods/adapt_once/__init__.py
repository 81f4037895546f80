"""Adapt once: LoRA by federated averaging in the first task, then sums of its frozen features.

After Guan et al., STSA (arXiv 2506.01327), and McDonnell et al., RanPAC, NeurIPS 2023 (arXiv
2307.02251), which adapt the backbone in the first task only.

Manifest (no torch): the training is that of `toolkit.lora`, the classifier that of
`toolkit.closed_form`. NOTES.md leads from the papers to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fcil_adapters.contract import (
    AveragingRule,
    BackboneInfo,
    Cadence,
    Exchange,
    Kind,
    Largest,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
)
from fcil_adapters.methods.adapt_once.options import AdaptOnceHparams
from fcil_adapters.methods.adapt_once.parts import (
    ADAPTER,
    COLLECT,
    HEAD,
    PART_DIGEST,
    TRAIN,
    UPLOAD_DIGEST,
    digest_spec,
)
from fcil_adapters.toolkit.closed_form.manifest import (
    SUMS_ECONOMIES,
    cap_ignored_reason,
    classifier_cadence,
    classifier_schemas,
    sums_dims,
    sums_exchanges,
    sums_forget,
    sums_largest,
    sums_statistics,
)
from fcil_adapters.toolkit.heads.rows import row_specs
from fcil_adapters.toolkit.lora.manifest import (
    SHORT,
    lora_averagings,
    lora_dims,
    lora_largest,
    lora_statistics,
    train_exchange,
    trained_names,
)
from fcil_adapters.toolkit.lora.tensors import lora_specs

NAME = "adapt_once"


def exchanges(h: AdaptOnceHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds of the first task, and the sums of every task."""
    digest = digest_spec(UPLOAD_DIGEST) if h.adapts else None
    # ``rows`` are those of the trained head here.
    sums = sums_exchanges(h, COLLECT, digest, height="height")
    if not h.adapts:
        return sums
    train = replace(
        train_exchange(NAME, h.adapt, backbone, averaged=True),
        rounds=h.adapt.rounds,
        first_task=True,
        trains=True,
        gives_up=h.adapt.skip_rounds,
    )
    return train, *sums


def broadcast(h: AdaptOnceHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the classifier, the projection's seed, the LoRA and its head."""
    kinds = classifier_schemas(h)
    if h.adapts:
        lora = lora_specs(trained_names(h.adapt), backbone)
        kinds[ADAPTER] = PayloadSchema((*lora, digest_spec(PART_DIGEST)))
        kinds[HEAD] = PayloadSchema(row_specs("rows"))
    return kinds


def dims(h: AdaptOnceHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the sizes of both halves of the method."""
    return lora_dims(h.adapt, backbone, task) | sums_dims(h, backbone, task)


def largest(h: AdaptOnceHparams, backbone: BackboneInfo, task: TaskInfo, clients: int) -> Largest:
    """Return the largest traffic; the trained head is no part of later tasks."""
    of = (
        lora_largest(h.adapt, backbone, task, clients),
        sums_largest(h, backbone, task, clients),
    )
    return Largest(
        without_tensors=tuple(name for one in of for name in one.without_tensors),
        without_parts=(HEAD,) if task.past else (),
    )


def statistics(h: AdaptOnceHparams, kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: the sums, and a mean that replaces training.

    Raises:
        ConfigError: groups of images are asked for.
    """
    return lora_statistics(h.adapt, kind, task) if kind == TRAIN else sums_statistics(h, kind, task)


def averagings(h: AdaptOnceHparams) -> tuple[AveragingRule, ...]:
    """Return the rules by which the training rounds may average; sums are always added."""
    return lora_averagings(h.adapt)


def uncapped(h: AdaptOnceHparams) -> str:
    """Return why the cap on weights has no effect; with training rounds it caps these."""
    return "" if h.adapts else cap_ignored_reason(NAME, h)


METHOD = Method(
    name=NAME,
    version="1",
    title="Adapt once: LoRA in the first task, then an exact linear classifier from sums",
    citation="STSA, https://arxiv.org/abs/2506.01327; RanPAC, NeurIPS 2023, "
    "https://arxiv.org/abs/2307.02251",
    hparams=AdaptOnceHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="fcil_adapters.methods.adapt_once.learner:Learner",
    aggregator="fcil_adapters.methods.adapt_once.aggregator:Aggregator",
    model="fcil_adapters.methods.adapt_once.model:Model",
    changes="fcil_adapters.methods.adapt_once.parts:weight_changes",
    starts=lambda _h: "its clients compare the digest of the LoRA that the server draws",
    presets={"short": {"adapt": SHORT}},
    frozen=True,
    cadence={
        **classifier_cadence(Cadence.FINISHED),
        ADAPTER: Cadence.TRAINED,
        HEAD: Cadence.TRAINED,
    },
    largest=largest,
    averagings=averagings,
    statistics=statistics,
    forgets=sums_forget,
    half=(Kind.LORA, Kind.HEAD),
    uncapped=uncapped,
    economies=SUMS_ECONOMIES,
)
