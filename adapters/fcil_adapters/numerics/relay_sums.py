"""The sum of several clients' uploads, as a relay sends it in place of them (torch-free).

It is an upload of the method, as one client with the images of all would send it, and a list of the
updates that are in it. Uploads are added in fixed point, so neither their order nor their division
among relays changes the total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fcil_adapters.contract.averaging import Additive
from fcil_adapters.numerics.fixed_point import I64, from_ring, to_ring
from fcil_adapters.numerics.weighted_sums import dense
from fcil_protocol.payloads.builtin import TRAIN_ACCURACY, TRAIN_LOSS
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

MOST_MEMBERS = 1024  # updates in one sum; each has an equal part of a sum's bound
_DIGESTS, _COUNTS, _METRICS = "member.digest", "member.counts", "member.metrics"
_SPECS = (
    TensorSpec(_DIGESTS, Kind.COUNT, ("members", 32), "U8"),
    # Samples, tensor bytes, and 1 if the loss is known plus 2 if the accuracy is.
    TensorSpec(_COUNTS, Kind.COUNT, ("members", 3), "I64", non_negative=True),
    TensorSpec(_METRICS, Kind.METRIC, ("members", 2), "F32", max_abs=1e6),
)
_NAMES = frozenset(spec.name for spec in _SPECS)


@dataclass(frozen=True)
class SumMember:
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


def sum_schema(upload: PayloadSchema) -> PayloadSchema:
    """Return the schema of sums of uploads; ``most_members`` is a known symbol of it.

    Sums are larger than what one client sends, and never in half precision.
    """
    tensors = (
        replace(
            spec,
            max_abs=spec.max_abs * MOST_MEMBERS,
            dtype="F32" if spec.dtype == "F16" else spec.dtype,
        )
        for spec in upload.tensors
    )
    bound = ("members", "most_members")
    return PayloadSchema((*tensors, *_SPECS), upload.meta, (*upload.at_most, bound))


class RunningSum:
    """The sum of the uploads of one round so far.

    Args:
        additive: the sums of the round's exchange.
        upload: the schema of its uploads.
        dims: the known symbols of its upload.
        classes: ids of the task's classes.

    Attributes:
        members: the updates that are in it.
    """

    def __init__(
        self,
        additive: Additive,
        upload: PayloadSchema,
        dims: Mapping[str, int],
        classes: tuple[int, ...],
    ) -> None:
        self._additive = additive
        self._names = {spec.name for spec in upload.tensors}
        self._classes = classes
        self._shapes = {
            spec.name: tuple(size if isinstance(size, int) else dims[size] for size in spec.shape)
            for spec in additive.sums
        }
        self._total: dict[str, I64] = {}
        self.members: list[SumMember] = []

    def add(self, upload: Payload, member: SumMember) -> None:
        """Add a checked upload.

        Raises:
            DataError: a number is too large to be added in fixed point; nothing was added.
        """
        sums = self._additive.read(upload)
        own = {
            spec.name: to_ring(dense(sums, spec, self._shapes[spec.name]), spec, MOST_MEMBERS)
            for spec in self._additive.sums
        }
        for name, values in own.items():
            if name in self._total:
                self._total[name] += values
            else:
                self._total[name] = values
        self.members.append(member)

    def payload(self) -> Payload:
        """Return the upload of all members together, with their list, in order of digest."""
        sums = {s.name: from_ring(self._total[s.name], s) for s in self._additive.sums}
        made = self._additive.write(sums, self._classes).tensors
        own = {name: array for name, array in made.items() if name in self._names}
        return Payload({**own, **_listed(sorted(self.members, key=lambda m: m.digest))})


def _listed(members: Sequence[SumMember]) -> dict[str, Array]:
    digests = np.frombuffer(b"".join(bytes.fromhex(m.digest) for m in members), np.uint8)
    known = [(TRAIN_LOSS in m.metrics) + 2 * (TRAIN_ACCURACY in m.metrics) for m in members]
    counts = [(m.samples, m.tensor_bytes, k) for m, k in zip(members, known, strict=True)]
    metrics = [[m.metrics.get(name, 0.0) for name in (TRAIN_LOSS, TRAIN_ACCURACY)] for m in members]
    return {
        _DIGESTS: digests.reshape(-1, 32),
        _COUNTS: np.asarray(counts, np.int64).reshape(-1, 3),
        _METRICS: np.asarray(metrics, np.float32).reshape(-1, 2),
    }


def members_of(payload: Payload) -> list[SumMember]:
    """Return the updates in a sum that keeps `sum_schema`."""
    digests = np.asarray(payload.tensors[_DIGESTS], np.uint8)
    found = []
    rows = zip(digests, payload.i64(_COUNTS).tolist(), payload.f32(_METRICS), strict=True)
    for digest, (samples, tensor_bytes, known), (loss, accuracy) in rows:
        metrics = {TRAIN_LOSS: float(loss)} if known & 1 else {}
        if known & 2:
            metrics[TRAIN_ACCURACY] = float(accuracy)
        found.append(SumMember(digest.tobytes().hex(), samples, tensor_bytes, metrics))
    return found


def without_members(payload: Payload) -> Payload:
    """Return the method's own part of a sum."""
    own = {name: array for name, array in payload.tensors.items() if name not in _NAMES}
    return Payload(own, payload.meta)


def member_faults(payload: Payload) -> list[str]:
    """Return every way in which a sum's list of members is not possible."""
    digests = np.asarray(payload.tensors[_DIGESTS], np.uint8)
    counts = payload.i64(_COUNTS)
    if not len(digests) or len(np.unique(digests, axis=0)) != len(digests):
        return ["its list names no update, or one twice"]
    if counts[:, 0].sum() != payload.i64("n").sum():
        return ["'n' is not the sum of its members' samples"]
    if (counts[:, 0] == 0).any():
        return ["its list names an update of no samples"]
    return []
