"""FedNCM: the nearest class mean of frozen features, federated.

Gwen Legate, Nicolas Bernier, Lucas Caccia, Edouard Oyallon, Eugene Belilovsky. Guiding The Last
Layer in Federated Learning with Pre-Trained Models. NeurIPS 2023.
https://arxiv.org/abs/2306.03937

Manifest (no torch): hyper-parameters, exchanges, schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Kind,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    late_cap_ignored_reason,
    separable,
)
from fcil_adapters.methods.fedncm.options import FedncmHparams
from fcil_adapters.numerics.class_reports import count_faults, count_spec
from fcil_adapters.numerics.weighted_sums import weighted_sums


def exchanges(h: FedncmHparams, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange of a task, one round: class means and counts; and late ones."""
    mean, *_ = _task("c")
    sums = weighted_sums([(mean, "classes")])
    train = Exchange("train", _upload("c"), 1, count_faults, additive=sums)
    return h.with_late_exchange(train, _upload("s"))


def _upload(rows: str) -> PayloadSchema:
    return PayloadSchema((*_task(rows), count_spec("n", 1)))


def broadcast(_hparams: FedncmHparams, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current task's part and of a finished task's part."""
    return {
        "current": PayloadSchema(_task("c")),
        "task": PayloadSchema(_task("rows"), at_most=(("rows", "past"),)),
    }


def _task(rows: str) -> tuple[TensorSpec, ...]:
    mean = TensorSpec("mean", Kind.PROTOTYPE, (rows, "d"))
    return (mean, count_spec("classes", rows), count_spec("count", rows))


def dims(_hparams: FedncmHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the task's classes c, past classes, s so far and the width d of a feature."""
    known = {"c": len(task.classes), "past": len(task.past), "s": len(task.seen)}
    return {**known, "d": backbone.dim}


def statistics(_hparams: FedncmHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all tensors sent but counts."""
    return (Statistic("class means", ("mean",)),)


METHOD = Method(
    name="fedncm",
    version="1",
    title="FedNCM: nearest class mean of frozen features",
    citation="G. Legate, N. Bernier, L. Caccia, E. Oyallon, E. Belilovsky. NeurIPS 2023. "
    "https://arxiv.org/abs/2306.03937",
    hparams=FedncmHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="fcil_adapters.methods.fedncm.learner:Learner",
    aggregator="fcil_adapters.methods.fedncm.aggregator:Aggregator",
    model="fcil_adapters.methods.fedncm.model:Model",
    frozen=True,
    cadence={"task": Cadence.TASK},
    statistics=statistics,
    forgets=separable,
    uncapped=late_cap_ignored_reason,
)
