"""A head of its own on frozen features: the nearest class mean in units of the spread.

The manifest (no torch): options, what travels, and where the halves are. Clients send
statistics of the frozen backbone's features, once for each task; nothing is trained.
"""

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Hparams,
    Kind,
    Method,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
    separable,
)
from fcil_adapters.numerics.class_reports import count_faults, count_spec
from pydantic import Field


class Options(Hparams):
    """Options that the server's configuration may set."""

    shrinkage: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the mean variance in each feature's own.",
    )


def statistics(rows: str) -> tuple[TensorSpec, ...]:
    """Describe the statistics of a task: class means, and the features' squares."""
    return (
        TensorSpec("mean", Kind.PROTOTYPE, (rows, "d")),
        TensorSpec("square", Kind.GAUSSIAN, (1, "d"), max_abs=1e8, non_negative=True),
        count_spec("classes", rows),
        count_spec("count", rows),
    )


def exchanges(_options: Options, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the rounds of a task: one, in which clients describe their images."""
    upload = PayloadSchema((*statistics("c"), count_spec("n", 1)))
    return (Exchange("train", upload, rounds=1, check=count_faults),)


def broadcast(
    _options: Options, _backbone: BackboneInfo
) -> Mapping[str, PayloadSchema]:
    """Return the schema of each kind of part: the current task, and a finished one."""
    return {
        "current": PayloadSchema(statistics("c")),
        "task": PayloadSchema(statistics("rows"), at_most=(("rows", "past"),)),
    }


def dims(_options: Options, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the values of the schemas' known symbols during a task."""
    return {"c": len(task.classes), "past": len(task.past), "d": backbone.dim}


METHOD = Method(
    name="my_head",
    version="1",
    title="The nearest class mean of frozen features, in units of their spread",
    citation="Not published.",
    hparams=Options,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="my_head.learner:Learner",
    aggregator="my_head.aggregator:Aggregator",
    model="my_head.model:Model",
    frozen=True,
    cadence={"task": Cadence.TASK},
    forgets=separable,
)
