"""A method that learns nothing: payloads of a given size, to measure what carries them.

It is found where this directory's parent is on PYTHONPATH, as an installed package would be.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, TaskInfo
from fcil_adapters.contract.averaging import F64, Additive, Sums
from fcil_adapters.contract.traffic import Cadence
from fcil_adapters.numerics.weighted_sums import count_sum, sum_spec
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec


class Options(Hparams):
    """How much, in how many tensors."""

    kilobytes: float = Field(default=300, gt=0, description="Bytes of all tensors / 1,000.")
    tensors: int = Field(default=1, ge=1, le=1000, description="Over how many tensors.")

    @property
    def each(self) -> int:
        """Values of one tensor, 4 bytes each."""
        return max(1, round(self.kilobytes * 250 / self.tensors))


def _weights(options: Options) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"w{i}", Kind.LORA, (options.each,), max_abs=1) for i in range(options.tensors)
    )


def exchanges(options: Options, _backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the only exchange."""
    n = TensorSpec("n", Kind.COUNT, (1,), dtype="I64", non_negative=True)
    schema = PayloadSchema((*_weights(options), n))
    # "trains": else a round behind masks would be a statistic, which a run sums up once.
    return (
        Exchange("train", schema, check=check_upload, trains=True, additive=_additive(options)),
    )


def _additive(options: Options) -> Additive:
    """Return the uploads as sums, for masked rounds: each client counts once, as in the average."""
    names = [spec.name for spec in _weights(options)]
    sums = (*map(sum_spec, _weights(options)), count_sum("clients"), count_sum("images"))

    def read(payload: Payload) -> dict[str, F64]:
        wide = {name: payload.f32(name).astype(np.float64) for name in names}
        return {**wide, "clients": np.ones(1), "images": payload.i64("n").astype(np.float64)}

    def write(total: Sums, _classes: tuple[int, ...]) -> Payload:
        means = {name: (total[name] / total["clients"]).astype(np.float32) for name in names}
        return Payload({**means, "n": np.rint(total["images"]).astype(np.int64)})

    return Additive(sums, read, write)


def check_upload(_payload: Payload, _task: TaskInfo) -> list[str]:
    """Find nothing wrong."""
    return []


def broadcast(options: Options, _backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schema of the only part: the averages."""
    return {"weights": PayloadSchema(_weights(options))}


def dims(_options: Options, _backbone: BackboneInfo, _task: TaskInfo) -> dict[str, int]:
    """Return nothing: all shapes are fixed."""
    return {}


METHOD = Method(
    name="payload",
    version="1",
    title="Random payloads of a given size",
    citation="none: it measures the federation, not learning",
    hparams=Options,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner="payload_method.halves:Learner",
    aggregator="payload_method.halves:Aggregator",
    model="payload_method.halves:Model",
    needs_backbone=False,
    cadence={"weights": Cadence.ROUND},
)
