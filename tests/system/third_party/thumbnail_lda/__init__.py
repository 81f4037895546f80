"""Linear discriminant analysis on small grey thumbnails, task after task.

Each class is a Gaussian around its mean thumbnail; all classes share one covariance.
After Hayes and Kanan (CVPR Workshops 2020), with thumbnails instead of deep features.
"""

from collections.abc import Mapping

from pydantic import Field

from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, TaskInfo
from fcil_adapters.contract.traffic import Cadence
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec


class Options(Hparams):
    """What the server's configuration may set."""

    side: int = Field(default=8, ge=2, le=32, description="Side of the thumbnails in pixels.")
    shrinkage: float = Field(default=1e-4, gt=0, le=1, description="Share of I in the covariance.")


COVARIANCE = TensorSpec("cov", Kind.GAUSSIAN, ("pixels", "pixels"), max_abs=1)  # grey: 0 to 1


def means(rows: str) -> TensorSpec:
    """Describe one mean thumbnail for each class."""
    return TensorSpec("mean", Kind.PROTOTYPE, (rows, "pixels"), max_abs=1)


def counts(name: str, rows: str | int) -> TensorSpec:
    """Describe a vector of whole numbers."""
    return TensorSpec(name, Kind.COUNT, (rows,), dtype="I64", non_negative=True)


def exchanges(_options: Options, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return what a task runs: class means, then the scatter around the merged means."""
    sizes = (counts("count", "c"), counts("n", 1))
    return (
        Exchange("prepare", PayloadSchema((means("c"), *sizes)), rounds=1, check=check_upload),
        Exchange("train", PayloadSchema((COVARIANCE, *sizes)), rounds=1, check=check_upload),
    )


def check_upload(payload: Payload, _task: TaskInfo) -> list[str]:
    """Return a sentence for each contradiction that a schema cannot see."""
    n, total = int(payload.i64("n")[0]), int(payload.i64("count").sum())
    return [] if n == total else [f"'n': expected {total}, the sum of 'count', got {n}"]


def broadcast(_options: Options, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schema of each kind of part."""

    def task(rows: str) -> tuple[TensorSpec, ...]:
        return (means(rows), counts("count", rows), counts("classes", rows))

    return {
        "current": PayloadSchema(task("c")),
        "task": PayloadSchema(task("rows"), at_most=(("rows", "past"),)),
        "shared": PayloadSchema((COVARIANCE,)),
    }


def dims(options: Options, _backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return the values of the schemas' known symbols during a task."""
    return {"c": len(task.classes), "past": len(task.past), "pixels": options.side**2}


METHOD = Method(
    name="thumbnail_lda",
    version="1",
    title="Streaming linear discriminant analysis on thumbnails",
    citation="T. Hayes, C. Kanan. CVPR Workshops 2020. https://arxiv.org/abs/1909.01520",
    hparams=Options,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="thumbnail_lda.learner:Learner",
    aggregator="thumbnail_lda.aggregator:Aggregator",
    model="thumbnail_lda.model:Model",
    needs_backbone=False,
    cadence={"task": Cadence.TASK},
)
