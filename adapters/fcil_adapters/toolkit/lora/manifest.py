"""Manifests of methods that train LoRA and a linear head: schemas of their tensors, and readers.

A method's manifest calls `lora_method`, which names the shared halves in `lora.halves` where a
method has none of its own; `lora.client` and `lora.server` hold their parts. All three use torch,
this module does not. A method states its differences in its options' properties
(`options.LoraHparams`) and adds to the schemas here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import BackboneInfo, Exchange, Method, TaskInfo
from fcil_adapters.contract.averaging import Additive, AveragingRule, every_rule, mean_only
from fcil_adapters.contract.privacy import Statistic
from fcil_adapters.contract.traffic import Cadence, Economy, Largest
from fcil_adapters.numerics.class_reports import count_faults, tally_specs
from fcil_adapters.numerics.task_parts import CURRENT, current_task, find_part, task_part
from fcil_adapters.numerics.weighted_sums import Weight, weighted_sums
from fcil_adapters.toolkit.heads.rows import F32, HEAD, HeadRows, head_specs, row_specs
from fcil_adapters.toolkit.lora.options import LoraHparams
from fcil_adapters.toolkit.lora.tensors import lora_names, lora_of, lora_places, lora_specs
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

FIXED = "fixed"  # the part with the A's that no client trains
TEACHER = "teacher"  # the part with the model of the last task's end

TASK_META = (MetaSpec("task", "int"),)

# Few rounds on a small backbone, whose features only a larger step moves (docs/methods/README.md,
# "Short schedules").
SHORT: Mapping[str, Any] = {"epochs": 3, "batch_size": 16, "lr_lora": 1e-2, "lr_head": 0.1}
# Where a method has no half of its own.
_LEARNER = "fcil_adapters.toolkit.lora.halves:LoraLearner"
_AGGREGATOR = "fcil_adapters.toolkit.lora.halves:LoraAggregator"
_MODEL = "fcil_adapters.toolkit.lora.halves:LinearModel"
_CHANGES = "fcil_adapters.toolkit.lora.low_rank:lora_changes"

LORA_ECONOMIES = (
    Economy("q and v alone", "the LoRA of the MLPs", {"modules": ["q", "v"]}),
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
)


def places(h: LoraHparams) -> tuple[str, ...]:
    """Return ``<block>.<module>`` for every adapted matrix, in a fixed order."""
    return lora_places(h.blocks, h.modules)


def factor_names(h: LoraHparams, *, of: str = "AB") -> tuple[str, ...]:
    """Return ``lora.<block>.<module>.<A|B>`` for the factors named in ``of``."""
    return lora_names(places(h), of)


def trained_names(h: LoraHparams) -> tuple[str, ...]:
    """Return the LoRA tensors that clients train and send."""
    return factor_names(h, of=h.trained_factors)


def sent_names(h: LoraHparams, round_: int) -> tuple[str, ...]:
    """Return the LoRA tensors that clients train and send in a round of a task."""
    return factor_names(h, of=h.factors_of(round_))


def round_factors(h: LoraHparams) -> tuple[str, ...]:
    """Return the factors of the rounds of a task: ``("AB",)``, or ``("B", "A")`` in turns."""
    return tuple(dict.fromkeys(h.factors_of(round_) for round_ in (0, 1)))


def upload_specs(h: LoraHparams, backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    """Return the specs of the LoRA tensors in uploads; those of rounds in turns are optional."""
    factors = round_factors(h)
    specs = lora_specs((n for of in factors for n in factor_names(h, of=of)), backbone)
    return tuple(replace(spec, optional=len(factors) > 1) for spec in specs)


def fixed_names(h: LoraHparams) -> tuple[str, ...]:
    """Return the LoRA tensors that stay as the server drew them."""
    return factor_names(h, of="".join(x for x in "AB" if x not in h.trained_factors))


def train_exchange(
    name: str,
    h: LoraHparams,
    backbone: BackboneInfo,
    *,
    more: tuple[TensorSpec, ...] = (),
    meta: tuple[MetaSpec, ...] = (),
    at_most: tuple[tuple[str, str], ...] = (),
    check: Callable[[Payload, TaskInfo], list[str]] | None = None,
    averaged: bool = False,
    weights: Mapping[str, Weight] | None = None,
) -> Exchange:
    """Return the training rounds: LoRA, head rows, counts, a lone class's mean, and ``more``.

    Args:
        name: the method's, for faults.
        h: its options.
        backbone: widths of the modules.
        more: further tensors of an upload.
        meta: further metadata of an upload.
        at_most: bounds of the free symbols of ``more``.
        check: rules for them, in addition to those of the counts.
        averaged: True if the aggregator averages LoRA and rows as `server.average_round` does, and
            has `server.start_of` as its ``start``.
        weights: those of the tensors of ``more`` in sums (`weighted_sums`); None: they are no sums.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks(name, h.blocks, backbone)
    upload = (
        *upload_specs(h, backbone),
        *head_specs("rows"),
        TensorSpec("mean", Kind.PROTOTYPE, (1, "d"), optional=True, exact=True),
        *tally_specs(),
        *more,
    )
    schema = PayloadSchema(upload, meta, at_most=at_most)
    averaged = averaged and len(round_factors(h)) == 1  # factors in turns depend on the round
    summed = averaged and not meta and (not more or weights is not None)
    return Exchange(
        "train",
        schema,
        check=partial(_upload_faults, h, check),
        averaged=averaged,
        additive=_additive(h, upload, weights or {}) if summed else None,
    )


def _additive(h: LoraHparams, specs: Iterable[TensorSpec], more: Mapping[str, Weight]) -> Additive:
    """Return the sums of uploads that `server.average_round` averages.

    A lone class's mean has none: masked rounds do not train on one (`masks.exchanges`).
    """
    usual: Weight = "images" if h.weights == "samples" else "clients"
    head: Weight = "classes" if h.head_average == "rows" else usual
    weights: dict[str, Weight] = {**dict.fromkeys(HEAD, head), **more}
    trained = (spec for spec in specs if spec.kind is not Kind.COUNT and spec.name != "mean")
    return weighted_sums((spec, weights.get(spec.name, usual)) for spec in trained)


def broadcast_schemas(
    name: str, h: LoraHparams, backbone: BackboneInfo, *, meta: tuple[MetaSpec, ...] = TASK_META
) -> dict[str, PayloadSchema]:
    """Return the schemas of those parts in the module's docstring that the options use.

    Args:
        name: the method's, for faults.
        h: its options.
        backbone: widths of the modules.
        meta: metadata of the current part.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks(name, h.blocks, backbone)
    trained = _exact(h, lora_specs(trained_names(h), backbone))
    kinds = {CURRENT: PayloadSchema((*trained, *row_specs("rows")), meta)}
    if h.past_rows == "frozen":
        kinds["task"] = PayloadSchema(
            row_specs("finished"), TASK_META, at_most=(("finished", "past"),)
        )
    if h.trained_factors != "AB":
        kinds[FIXED] = PayloadSchema(_exact(h, lora_specs(fixed_names(h), backbone)))
    if h.keeps_teacher:
        rows = () if h.past_rows == "frozen" else row_specs("past")
        kinds[TEACHER] = PayloadSchema((*trained, *rows), TASK_META)
    return kinds


def lora_dims(h: LoraHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, r, the task's classes c, past and seen classes, and the trained rows."""
    return {
        "d": backbone.dim,
        "r": h.rank,
        "c": len(task.classes),
        "past": len(task.past),
        "seen": len(task.seen),
        "rows": len(task.seen if h.past_rows == "together" else task.classes),
    }


def lora_largest(h: LoraHparams, _b: BackboneInfo, task: TaskInfo, _clients: int) -> Largest:
    """Return the largest traffic: means for lone classes only, no teacher in the first task."""
    return Largest(
        without_tensors=() if h.single_column(task) else ("mean",),
        without_parts=(TEACHER,) if h.keeps_teacher and not task.past else (),
    )


def lora_statistics(h: LoraHparams, kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistic: the mean feature, where it replaces training."""
    told = kind == "train" and h.single_column(task)
    return (Statistic("class means", ("mean",)),) if told else ()


def lora_averagings(h: LoraHparams) -> tuple[AveragingRule, ...]:
    """Return the rules of averaging; rows with weights of their own are plain means."""
    return mean_only(h) if h.head_average == "rows" else every_rule(h)


def lora_starts(h: LoraHparams) -> str:
    """Return why a run cannot begin with an adapter: options by which each task draws a LoRA."""
    return "each of its tasks trains a LoRA of its own" if h.fresh_lora else ""


def lora_method(
    name: str,
    title: str,
    citation: str,
    hparams: type[LoraHparams],
    *,
    learner: str = _LEARNER,
    aggregator: str = _AGGREGATOR,
    model: str = _MODEL,
    changes: str = _CHANGES,
    **more: Any,
) -> Method:
    """Return the manifest of a method.

    Args:
        name: the method's.
        title: for people.
        citation: of its paper.
        hparams: its options.
        learner: ``package.module:Class``; by default cross-entropy alone (`lora.halves`).
        aggregator: likewise; by default plain averages.
        model: likewise; by default the head as it is trained.
        changes: ``package.module:function``; by default of one LoRA (`lora.low_rank`).
        more: fields of `Method` that differ; ``cadence`` adds to that of the room's parts,
            which are those of the default options.
    """
    common: dict[str, Any] = {
        "version": "1",
        "exchanges": lambda h, backbone: (
            train_exchange(name, h, backbone, averaged=aggregator == _AGGREGATOR),
        ),
        "broadcast": lambda h, backbone: broadcast_schemas(name, h, backbone),
        "dims": lora_dims,
        "largest": lora_largest,
        "statistics": lora_statistics,
        "averagings": lora_averagings,
        "starts": lora_starts,
        "half": (Kind.LORA, Kind.HEAD),
        "presets": {"short": SHORT},
        "economies": LORA_ECONOMIES,
    }
    plain = hparams()
    usual = {
        "task": Cadence.TASK if plain.past_rows == "frozen" else None,
        FIXED: Cadence.RUN if plain.trained_factors != "AB" else None,
        TEACHER: Cadence.OPENING if plain.keeps_teacher else None,
    }
    stated = {kind: when for kind, when in usual.items() if when is not None}
    cadence = stated | dict(more.pop("cadence", {}))
    return Method(
        name=name, title=title, citation=citation, hparams=hparams,
        learner=learner, aggregator=aggregator, model=model, changes=changes,
        **{**common, **more, "cadence": cadence},
    )  # fmt: skip


@dataclass(frozen=True)
class LoraBroadcast:
    """A complete broadcast.

    Attributes:
        lora: `factor_names` -> (r, in) or (out, r).
        tasks: finished tasks' rows in order, if they are parts, then the current ones.
        teacher: LoRA and rows of the last task's end; None at first, or for methods without one.
    """

    lora: Mapping[str, F32]
    tasks: tuple[HeadRows, ...]
    teacher: tuple[Mapping[str, F32], HeadRows] | None = None


def read_parts(h: LoraHparams, broadcast: Mapping[str, Payload]) -> LoraBroadcast:
    """Read a broadcast.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    current = find_part(broadcast, CURRENT)
    task = current_task(current)
    fixed = lora_of(find_part(broadcast, FIXED)) if h.trained_factors != "AB" else {}
    finished = task if h.past_rows == "frozen" else 0
    past = tuple(HeadRows.of(find_part(broadcast, task_part(t)).tensors) for t in range(finished))
    teacher = None
    if h.keeps_teacher and task > 0:
        part = find_part(broadcast, TEACHER)
        known = HeadRows.joined(past) if past else HeadRows.of(part.tensors)
        teacher = ({**fixed, **lora_of(part)}, known)
    return LoraBroadcast(
        lora={**lora_of(current), **fixed},
        tasks=(*past, HeadRows.of(current.tensors)),
        teacher=teacher,
    )


def _exact(h: LoraHparams, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, exact=h.exact_lora) for spec in specs)


def _upload_faults(
    h: LoraHparams,
    check: Callable[[Payload, TaskInfo], list[str]] | None,
    payload: Payload,
    task: TaskInfo,
) -> list[str]:
    """Return how an upload contradicts itself or the task."""
    faults = count_faults(payload, task)
    images = int(payload.i64("n").sum())
    expected = h.single_column(task) and images >= h.min_count_upload
    if ("mean" in payload.tensors) != expected:
        word = "to be there" if expected else "not to be there"
        faults.append(
            f"'mean': expected {word} (a task of {len(task.classes)} classes, {images} images)"
        )
    rounds = [set(factor_names(h, of=of)) for of in round_factors(h)]
    if len(rounds) > 1 and set(lora_of(payload)) not in rounds:
        faults.append("LoRA: expected all tensors of one round, either A or B, and no others")
    return faults + (check(payload, task) if check else [])
