"""Nearest class mean on small grey thumbnails: a minimal example of a method.

Each client sends the mean thumbnail of each of its classes, the server merges them into the means
over all images, and a picture belongs to the nearest mean. numpy only, no backbone.

Manifest: hyper-parameters, exchanges, schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Economy,
    Exchange,
    Kind,
    LateHparams,
    Method,
    Payload,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    late_cap_ignored_reason,
    separable,
)
from fcil_adapters.numerics.weighted_sums import weighted_sums


class RunningMeanHparams(LateHparams):
    """The side of the thumbnails, and what becomes of late images."""

    side: int = Field(default=8, ge=1, le=64, description="Side of the thumbnails in pixels.")


def exchanges(h: RunningMeanHparams, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange: mean thumbnails (zero where there is no image) and counts."""

    def upload(rows: str) -> PayloadSchema:
        return PayloadSchema(
            (
                TensorSpec("mean", Kind.PROTOTYPE, (rows, "pixels"), max_abs=1, exact=True),
                TensorSpec("count", Kind.COUNT, (rows,), dtype="I64", non_negative=True),
                TensorSpec("n", Kind.COUNT, (1,), dtype="I64", non_negative=True),
            )
        )

    sums = weighted_sums([(upload("c").tensors[0], "classes")])
    train = Exchange("train", upload("c"), check=check_upload, additive=sums)
    return h.with_late_exchange(train, upload("s"))


def check_upload(payload: Payload, _task: TaskInfo) -> list[str]:
    """Return a sentence if the number of images contradicts the counts."""
    n, total = int(payload.i64("n")[0]), int(payload.i64("count").sum())
    return [] if n == total else [f"'n': expected {total}, the sum of 'count', got {n}"]


def broadcast(_hparams: RunningMeanHparams, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current task's part and of a finished task's part."""

    def task(rows: str) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("mean", Kind.PROTOTYPE, (rows, "pixels"), max_abs=1, exact=True),
            TensorSpec("count", Kind.COUNT, (rows,), dtype="I64", non_negative=True),
            TensorSpec("classes", Kind.COUNT, (rows,), dtype="I64", non_negative=True),
        )

    return {
        "current": PayloadSchema(task("c")),
        "task": PayloadSchema(task("rows"), at_most=(("rows", "past"),)),
    }


def dims(hparams: RunningMeanHparams, _backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the task's classes c, past classes, s so far and the pixels of a thumbnail."""
    known = {"c": len(task.classes), "past": len(task.past), "s": len(task.seen)}
    return {**known, "pixels": hparams.side**2}


def statistics(_hparams: RunningMeanHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: all tensors sent but counts."""
    return (Statistic("class means", ("mean",)),)


METHOD = Method(
    name="running_mean",
    version="1",
    title="Nearest class mean on thumbnails",
    citation="Mensink et al., Distance-Based Image Classification: Generalizing to New Classes "
    "at Near-Zero Cost, TPAMI 2013",
    hparams=RunningMeanHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="fcil_adapters.methods.running_mean.learner:Learner",
    aggregator="fcil_adapters.methods.running_mean.aggregator:Aggregator",
    model="fcil_adapters.methods.running_mean.model:Model",
    needs_backbone=False,
    cadence={"task": Cadence.TASK},
    statistics=statistics,
    forgets=separable,
    uncapped=late_cap_ignored_reason,
    economies=(Economy("thumbnails of 4 x 4 pixels", "detail", {"side": 4}),),
)
