"""Fed-TaLoRA: task-agnostic low-rank residual adaptation.

Feng Yu, Jia Hu, Geyong Min: Efficient Federated Class-Incremental Learning of Pre-Trained
Models via Task-agnostic Low-rank Residual Adaptation. 2025. https://arxiv.org/abs/2505.12318

Manifest (no torch): hyper-parameters, exchanges, schemas. The way from the equations to the
functions, and every deviation, is in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fcil_adapters.averaging_rules import AveragingRule, every_rule, mean_only
from fcil_adapters.cadence import Cadence
from fcil_adapters.claims import Claim
from fcil_adapters.class_reports import count_faults, count_spec
from fcil_adapters.contract import BackboneInfo, Exchange, Method, TaskInfo
from fcil_adapters.lora_tensors import lora_specs, module_of, module_shape
from fcil_adapters.methods.fed_talora.options import ECONOMIES, PRESETS, FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import factor_names, places, trained_names
from fcil_adapters.methods.fed_talora.traffic import largest
from fcil_adapters.placement import check_blocks
from fcil_adapters.privacy import Statistic
from fcil_protocol.payload import Payload
from fcil_protocol.schema import Kind, MetaSpec, PayloadSchema, TensorSpec


def exchanges(hparams: FedTaloraHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the one exchange of a task, its training rounds.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("fed_talora", hparams.blocks, backbone)
    upload = (
        *lora_specs(trained_names(hparams), backbone),
        *_head("rows"),
        TensorSpec("mean", Kind.PROTOTYPE, (1, "d"), optional=True, exact=True),
        count_spec("classes", "c"),
        count_spec("count", "c"),
        count_spec("n", 1),
    )
    schema = PayloadSchema(upload, (MetaSpec("version", "int"),))
    return (Exchange("train", schema, check=partial(_faults, hparams)),)


def broadcast(hparams: FedTaloraHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part, finished tasks, fixed A's, residuals and base."""
    check_blocks("fed_talora", hparams.blocks, backbone)
    flags = (count_spec("classes", "rows"), count_spec("seen", "rows"))
    # Rounded averages would make every residual 2 r wider, which is more than their halves save.
    lora = [
        replace(spec, exact=hparams.corrects)
        for spec in lora_specs(trained_names(hparams), backbone)
    ]
    current = (*lora, *_head("rows"), *flags)
    meta = tuple(MetaSpec(name, "int") for name in ("task", "version", "base"))
    kinds = {"current": PayloadSchema(current, meta)}
    if hparams.head_loss != "all":
        finished = (
            *_head("finished"),
            count_spec("classes", "finished"),
            count_spec("seen", "finished"),
        )
        task = (MetaSpec("task", "int"),)
        kinds["task"] = PayloadSchema(finished, task, at_most=(("finished", "past"),))
    if hparams.freeze_a:
        fixed = lora_specs(factor_names(hparams, of="A"), backbone)
        kinds["fixed"] = PayloadSchema(
            tuple(replace(spec, exact=hparams.corrects) for spec in fixed)
        )
    if hparams.corrects:
        kinds |= _residual_schemas(hparams, backbone)
    return kinds


def dims(hparams: FedTaloraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, the task's classes c, past classes, the head's rows and the largest rank."""
    return {
        "d": backbone.dim,
        "r": hparams.rank,
        "c": len(task.classes),
        "past": len(task.past),
        "rows": len(task.seen if hparams.head_loss == "all" else task.classes),
        "max_rank": min(backbone.dim, backbone.mlp_dim),
    }


def statistics(hparams: FedTaloraHparams, _kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return what noise protects: the mean feature, which stands in for training if need be."""
    return (Statistic("class means", ("mean",)),) if hparams.single_column(task) else ()


def averagings(hparams: FedTaloraHparams) -> tuple[AveragingRule, ...]:
    """Return the rules of averaging that it can work with.

    The residual repairs what the plain mean loses (Eq. 4); beside another average it would put
    the outliers back. Rows with weights of their own are plain means too.
    """
    plain = hparams.corrects or hparams.head_average == "rows"
    return mean_only(hparams) if plain else every_rule(hparams)


def _head(rows: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("head.weight", Kind.HEAD, (rows, "d")),
        TensorSpec("head.bias", Kind.HEAD, (rows,)),
    )


def _residual_schemas(
    hparams: FedTaloraHparams, backbone: BackboneInfo
) -> dict[str, PayloadSchema]:
    """Describe residuals: every matrix has its own rank, bounded by the smaller side."""
    factors, dense, bounds = [], [], []
    for place in places(hparams):
        out, width = module_shape(module_of(place), backbone)
        rank = f"rank.{place}"
        factors.append(TensorSpec(f"{place}.L", Kind.RESIDUAL, (out, rank)))
        factors.append(TensorSpec(f"{place}.R", Kind.RESIDUAL, (rank, width)))
        dense.append(TensorSpec(place, Kind.RESIDUAL, (out, width)))
        bounds.append((rank, "max_rank"))
    meta = (MetaSpec("version", "int"),)
    return {
        "residual": PayloadSchema(tuple(factors), meta, at_most=tuple(bounds)),
        "base": PayloadSchema(tuple(dense), meta),
    }


def _faults(hparams: FedTaloraHparams, payload: Payload, task: TaskInfo) -> list[str]:
    """Return how an upload contradicts itself or the task."""
    faults = count_faults(payload, task)
    images = int(payload.i64("n").sum())
    expected = hparams.single_column(task) and images >= hparams.min_count_upload
    if ("mean" in payload.tensors) != expected:
        word = "to be there" if expected else "not to be there"
        faults.append(
            f"'mean': expected {word} (a task of {len(task.classes)} classes, {images} images)"
        )
    return faults


def _half(name: str) -> str:
    return f"fcil_adapters.methods.fed_talora.{name}"


METHOD = Method(
    name="fed_talora",
    version="1",
    title="Fed-TaLoRA: Federated Task-agnostic Low-rank Residual Adaptation",
    citation="F. Yu, J. Hu, G. Min. 2025. https://arxiv.org/abs/2505.12318",
    hparams=FedTaloraHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner=_half("learner:Learner"),
    aggregator=_half("aggregator:Aggregator"),
    model=_half("model:Model"),
    presets=PRESETS,
    cadence={
        "task": Cadence.TASK,
        "fixed": Cadence.RUN,
        "residual": Cadence.LOG,
        "base": Cadence.BASE,
    },
    largest=largest,
    averagings=averagings,
    statistics=statistics,
    half=(Kind.LORA, Kind.HEAD),
    claim=Claim(
        said="0.36 million parameters a round",
        up_bytes=718_888,
        down_bytes=718_888,
        leaves_out="the residual, on the way down",
    ),
    economies=ECONOMIES,
)
