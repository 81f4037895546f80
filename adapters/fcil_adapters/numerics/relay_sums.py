"""Updates that are added up: by relays, each for its clients, and by the server (torch-free).

A relay sends the sums of its clients' uploads, in fixed point, and a list of the updates that are
in them. The server adds these and the other updates, and the method sees one upload, as a client
with the images of all would send it. Whole numbers are added, so neither the order of updates nor
their division among relays changes the state by a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fcil_adapters.contract import (
    Aggregator,
    Context,
    Exchange,
    Part,
    Progress,
    State,
    TaskInfo,
    Update,
    Updates,
)
from fcil_adapters.contract.averaging import Additive
from fcil_adapters.numerics.fixed_point import I64, added, from_fixed_point, to_fixed_point
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.numerics.weighted_sums import dense
from fcil_protocol.errors import InternalError
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.builtin import TRAIN_ACCURACY, TRAIN_LOSS
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

TOGETHER = ClientId("a" * 26)  # the client whose update is the sum of all
MOST_SUMMED = 1024  # updates in one sum of a relay
MOST_UPDATES = 4096  # each has an equal part of a sum's bound
_DIGESTS, _COUNTS, _METRICS = "update.digest", "update.counts", "update.metrics"
_LISTS = (
    TensorSpec("n", Kind.COUNT, (1,), "I64", non_negative=True),
    TensorSpec(_DIGESTS, Kind.COUNT, ("updates", 32), "U8"),
    # Samples, tensor bytes, and 1 if the loss is known plus 2 if the accuracy is.
    TensorSpec(_COUNTS, Kind.COUNT, ("updates", 3), "I64", non_negative=True),
    TensorSpec(_METRICS, Kind.METRIC, ("updates", 2), "F32", max_abs=1e6),
)


@dataclass(frozen=True)
class SummedUpdate:
    """One update in a sum.

    Attributes:
        digest: of the update (hex).
        samples: it was made from.
        tensor_bytes: of its payload.
        metrics: of its training, if its client reports them.
    """

    digest: str
    samples: int
    tensor_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def sum_schema(additive: Additive) -> PayloadSchema:
    """Return the schema of a relay's sums; ``most_summed`` is a known symbol of it."""
    sums = (TensorSpec(spec.name, Kind.SUM, spec.shape, "I64") for spec in additive.sums)
    return PayloadSchema((*sums, *_LISTS), (), (("updates", "most_summed"),))


def in_fixed_point(additive: Additive, upload: Payload, dims: Mapping[str, int]) -> dict[str, I64]:
    """Return an upload's sums as whole numbers.

    Raises:
        DataError: a number is too large.
    """
    sums = additive.read(upload)
    return {
        spec.name: to_fixed_point(dense(sums, spec, _shape(spec.shape, dims)), spec, MOST_UPDATES)
        for spec in additive.sums
    }


def _shape(shape: Sequence[int | str], dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else dims[size] for size in shape)


def written(additive: Additive, total: Mapping[str, I64], classes: tuple[int, ...]) -> Payload:
    """Return the upload of a client that had the images of all."""
    sums = {spec.name: from_fixed_point(total[spec.name], spec) for spec in additive.sums}
    return additive.write(sums, classes)


class RunningSum:
    """The sum of the uploads of one round so far.

    Args:
        additive: the sums of the round's exchange.
        dims: the known symbols of its upload.

    Attributes:
        updates: those that are in it.
    """

    def __init__(self, additive: Additive, dims: Mapping[str, int]) -> None:
        self._additive = additive
        self._dims = dims
        self._total: dict[str, I64] = {}
        self.updates: list[SummedUpdate] = []

    def add(self, upload: Payload, update: SummedUpdate) -> None:
        """Add a checked upload.

        Raises:
            DataError: a number is too large to be added in fixed point; nothing was added.
        """
        own = in_fixed_point(self._additive, upload, self._dims)
        self._total = added([self._total, own])
        self.updates.append(update)

    def payload(self) -> Payload:
        """Return the sums and the list of updates, in order of digest."""
        updates = sorted(self.updates, key=lambda update: update.digest)
        return Payload({**self._total, **_listed(updates)})


def _listed(updates: Sequence[SummedUpdate]) -> dict[str, Array]:
    digests = np.frombuffer(b"".join(bytes.fromhex(u.digest) for u in updates), np.uint8)
    known = [(TRAIN_LOSS in u.metrics) + 2 * (TRAIN_ACCURACY in u.metrics) for u in updates]
    counts = [(u.samples, u.tensor_bytes, k) for u, k in zip(updates, known, strict=True)]
    metrics = [[u.metrics.get(name, 0.0) for name in (TRAIN_LOSS, TRAIN_ACCURACY)] for u in updates]
    return {
        "n": np.array([sum(u.samples for u in updates)], np.int64),
        _DIGESTS: digests.reshape(-1, 32),
        _COUNTS: np.asarray(counts, np.int64).reshape(-1, 3),
        _METRICS: np.asarray(metrics, np.float32).reshape(-1, 2),
    }


def updates_of(payload: Payload) -> list[SummedUpdate]:
    """Return the updates in a sum that keeps `sum_schema`."""
    digests = np.asarray(payload.tensors[_DIGESTS], np.uint8)
    found = []
    rows = zip(digests, payload.i64(_COUNTS).tolist(), payload.f32(_METRICS), strict=True)
    for digest, (samples, tensor_bytes, known), (loss, accuracy) in rows:
        metrics = {TRAIN_LOSS: float(loss)} if known & 1 else {}
        if known & 2:
            metrics[TRAIN_ACCURACY] = float(accuracy)
        found.append(SummedUpdate(digest.tobytes().hex(), samples, tensor_bytes, metrics))
    return found


def sum_faults(exchange: Exchange, payload: Payload, task: TaskInfo) -> list[str]:
    """Return every way in which a payload that keeps `sum_schema` is no sum of updates."""
    assert exchange.additive is not None, "its updates can be added up"
    digests = np.asarray(payload.tensors[_DIGESTS], np.uint8)
    samples = payload.i64(_COUNTS)[:, 0]
    if not len(digests) or len(np.unique(digests, axis=0)) != len(digests):
        return ["its list names no update, or one twice"]
    if (samples == 0).any():
        return ["its list names an update of no samples"]
    if samples.sum() != payload.i64("n").sum():
        return ["'n' is not the sum of the samples of its updates"]
    total = {spec.name: payload.i64(spec.name) for spec in exchange.additive.sums}
    if any(total[s.name].min(initial=0) < 0 for s in exchange.additive.sums if not s.bits):
        return ["a count is negative"]
    try:
        upload = written(exchange.additive, total, task.classes)
    except InternalError as error:
        return [error.message.rstrip(".")]
    if upload.i64("n").sum() != samples.sum():
        return ["its sums are not of 'n' samples"]
    return exchange.check(upload, task)


@dataclass(frozen=True)
class SummedAggregator:
    """Adds up updates, and hands the sum to a method's own server half.

    Attributes:
        inner: the method's own half, which sees one update with the images of all.
        exchanges: the method's, by kind; those without sums are left to it.
        dims: the known symbols of the uploads of the context's task.
    """

    inner: Aggregator
    exchanges: Mapping[str, Exchange]
    dims: Mapping[str, int]

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return self.inner.init(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Open a task."""
        return self.inner.open_task(ctx, state)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the method's parts."""
        return self.inner.broadcast(ctx, state)

    def adds_up(self, kind: str) -> bool:
        """Return True if the updates of a kind of round are added up."""
        return self.exchanges[kind].summable

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Return the state with a round's updates and relays' sums combined."""
        additive = self.exchanges[ctx.kind].additive
        if additive is None or not self.adds_up(ctx.kind):
            return self.inner.aggregate(ctx, state, updates)
        total: dict[str, I64] = {}
        for number, update in enumerate(updates):
            ctx.progress(Progress(number, len(updates)))
            payload = update.payload
            if _DIGESTS in payload.tensors:
                own = {spec.name: payload.i64(spec.name) for spec in additive.sums}
            else:
                own = in_fixed_point(additive, payload, self.dims)
            total = added([total, own])
        upload = written(additive, total, ctx.task.classes)
        return self.inner.aggregate(ctx, state, UpdateList((Update(TOGETHER, upload),)))
