"""Forms in which tensors travel: kinds that go in half precision, both ways (torch-free).

Methods compute with float32 and declare F32. Workers narrow outgoing tensors and widen incoming
ones, so a daemon, the spool and the wire see the half form, and a method never does. A server
rounds its broadcasts before, in its state (`Forms.commit`): so state, broadcast and what every
client decodes are equal to the bit, and narrowing parts loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import ConfigError, DoesNotFit, InternalError
from fcil_protocol.payloads.payload import WIRE_DTYPES, Array, Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

F32 = NDArray[np.float32]

WEIGHTS: Final = "weights"  # short for all kinds that a method offers
NOTHING: Final = "none"
LARGEST = float(np.finfo(np.float16).max)  # 65,504
MUCH = 0.25  # a client warns if this share of a round's step does not arrive

# Tensors that further computations need exactly, or that have no room: the reason of each.
EXACT_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.GAUSSIAN: "means and covariances are merged and sampled from",
        Kind.GRAM: "sums of products are solved, and small errors of them grow",
        Kind.RESIDUAL: "it makes averages exact, and its own rounding would add up over rounds",
        Kind.IMPORTANCE: "squared gradients are smaller than half precision can distinguish from 0",
        Kind.COUNT: "counts are whole numbers",
        Kind.METRIC: "results are reported exactly",
    }
)
_HALF, _FULL = WIRE_DTYPES["F16"], WIRE_DTYPES["F32"]


@dataclass(frozen=True)
class Forms:
    """The forms of a run's tensors.

    Attributes:
        half: the kinds whose float32 tensors travel as F16; statistics among them
            (`TensorSpec.exact`) do not.
    """

    half: frozenset[Kind] = frozenset()

    @property
    def names(self) -> list[str]:
        """The kinds by name, sorted, as messages give them."""
        return sorted(kind.value for kind in self.half)

    def schema(self, schema: PayloadSchema) -> PayloadSchema:
        """Return a method's schema as its payloads travel."""
        if not self.half:
            return schema
        return replace(schema, tensors=tuple(self._spec(spec) for spec in schema.tensors))

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        if spec.kind not in self.half or spec.exact or spec.dtype != "F32":
            return spec
        return replace(spec, dtype="F16", max_abs=min(spec.max_abs, LARGEST))

    def narrow(self, payload: Payload, schema: PayloadSchema) -> Payload:
        """Return a learner's upload as it travels.

        Args:
            payload: of the learner.
            schema: of the upload as it travels.

        Raises:
            DoesNotFit: a number is too large. Nothing of the payload may be sent then.
        """
        tensors = dict(payload.tensors)
        for name in self._halved(payload, schema):
            array = np.asarray(tensors[name], dtype=np.float32)
            _must_fit(array, f"tensor {name!r}")
            tensors[name] = array.astype(_HALF)
        return Payload(tensors, payload.meta)

    def narrow_exactly(self, payload: Payload, schema: PayloadSchema) -> Payload:
        """Return a part as it travels; its readers decode exactly the numbers of the state.

        Raises:
            InternalError: the method broadcasts numbers that it has not committed.
        """
        tensors = dict(payload.tensors)
        for name in self._halved(payload, schema):
            half = _rounded(tensors[name])
            if not np.array_equal(half, tensors[name], equal_nan=True):
                raise InternalError(
                    f"tensor {name!r} is broadcast in half precision and holds numbers that this "
                    "would change: the method must commit them (`ctx.forms.commit`)."
                )
            tensors[name] = half
        return Payload(tensors, payload.meta)

    def _halved(self, payload: Payload, schema: PayloadSchema) -> Iterable[str]:
        """Yield the payload's tensors that the schema wants in half precision."""
        for spec in schema.tensors if self.half else ():
            array = payload.tensors.get(spec.name)
            if spec.dtype == "F16" and array is not None and array.dtype == _FULL:
                yield spec.name

    def rounding_loss(
        self, trained: Payload, sent: Payload, parts: Iterable[Payload]
    ) -> dict[str, float]:
        """Return the share of a round's training that does not arrive after rounding, by kind.

        A half has 11 bits: a step of less than 1/4,000 of the number that it changes is lost.
        Larger ones become a little longer or shorter, which evens out over the numbers of a
        tensor: so it is the length along the whole step that counts.

        Args:
            trained: the learner's result.
            sent: the same, narrowed.
            parts: the broadcast that it started from, widened. Tensors that share name and shape
                with none of them are left out; of several the nearest counts.

        Returns:
            Kind as names begin with it -> 1 - (sent - start) . step / step . step, or 0 where the
            step arrives whole or longer.
        """
        arrives: dict[str, float] = {}
        whole: dict[str, float] = {}
        starts = list(parts)
        for name, half in sent.tensors.items():
            full = trained.tensors[name]
            near = [p.tensors[name] for p in starts if name in p.tensors]
            steps = [_difference(full, one) for one in near if one.shape == full.shape]
            if half.dtype == _HALF and full.dtype == _FULL and steps:
                kind = name.partition(".")[0]
                step = min(steps, key=lambda s: float(s @ s))
                rounding = _difference(half, full)
                whole[kind] = whole.get(kind, 0.0) + float(step @ step)
                arrives[kind] = arrives.get(kind, 0.0) + float((step + rounding) @ step)
        return {k: max(0.0, 1 - arrives[k] / length) for k, length in whole.items() if length}

    def widen(self, payload: Payload) -> Payload:
        """Return a payload in float32, as methods compute with it, without any loss."""
        if not self.half:
            return payload
        tensors = {
            name: array.astype(np.float32) if array.dtype == _HALF else array
            for name, array in payload.tensors.items()
        }
        return Payload(tensors, payload.meta)

    def commit(self, kind: Kind, array: Array) -> F32:
        """Return numbers as clients will decode them, for the state and the broadcast.

        Raises:
            DoesNotFit: a number is too large for the form.
        """
        values = np.asarray(array, dtype=np.float32)
        if kind not in self.half:
            return values
        _must_fit(values, f"a tensor of kind {kind.value!r}")
        return _rounded(values).astype(np.float32)

    def commit_named(self, tensors: Mapping[str, Array]) -> dict[str, F32]:
        """Commit tensors whose names begin with their kind, such as ``lora.0.q.A``."""
        return {n: self.commit(Kind(n.partition(".")[0]), array) for n, array in tensors.items()}


EXACT = Forms()


def read_half(value: object) -> str | list[Kind]:
    """Read a value of ``[wire] half``: `WEIGHTS`, `NOTHING`, or a list of kinds.

    Raises:
        ValueError: it is something else, or names a kind that always travels as it is.
    """
    if value in (WEIGHTS, NOTHING):
        return str(value)
    names = {kind.value for kind in Kind}
    listed: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(k, str) and k in names for k in listed):
        known = ", ".join(f'"{kind}"' for kind in Kind if kind not in EXACT_KINDS)
        raise ValueError(f'should be "{WEIGHTS}", "{NOTHING}" or a list of some of {known}')
    kinds = [Kind(kind) for kind in listed]
    exact = [f"{kind.value} ({EXACT_KINDS[kind]})" for kind in kinds if kind in EXACT_KINDS]
    if exact:
        raise ValueError(f"these kinds are always sent unchanged: {', '.join(exact)}")
    return kinds


def forms_of(half: object, method: str, offered: tuple[Kind, ...]) -> Forms:
    """Return the forms of a setting of ``[wire] half`` (`read_half`).

    Args:
        half: the setting.
        method: the method's name.
        offered: the kinds that it commits.

    Raises:
        ConfigError: the setting is invalid, or the method cannot send one of the kinds so.
    """
    try:
        wanted = read_half(half)
    except ValueError as error:
        raise ConfigError(f"wire.half {error}.") from error
    if isinstance(wanted, str):
        return Forms(frozenset(offered if wanted == WEIGHTS else ()))
    wrong = [kind for kind in wanted if kind not in offered]
    if wrong:
        known = ", ".join(kind.value for kind in offered) or "none"
        raise ConfigError(
            f"wire.half names {', '.join(wrong)}, but the method {method} can send in half "
            f"precision: {known}.",
            action=f'Set wire.half to kinds of that list, to "{WEIGHTS}" for all of them, or to '
            f'"{NOTHING}".',
        )
    return Forms(frozenset(wanted))


def describe_rounding_loss(lost: Mapping[str, float]) -> list[str]:
    """Return a sentence for each kind of which rounding lost `MUCH` of a round's training."""
    return [
        f"half precision drops {min(share, 1):.0%} of this round's step of {kind} (told from "
        f"{MUCH:.0%} on): many of its changes are smaller than the last bit of the values; a new "
        f"run without {kind} in [wire] half sends them whole"
        for kind, share in lost.items()
        if share >= MUCH
    ]


def _difference(one: Array, other: Array) -> NDArray[np.float64]:
    return (one.astype(np.float64) - other.astype(np.float64)).ravel()


def _rounded(array: Array) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # callers check for overflow
        return array.astype(_HALF)


def _must_fit(array: F32, what: str) -> None:
    """Refuse finite numbers beyond the form; NaN and infinity are for the checks of values."""
    largest = float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))
    if largest > LARGEST:
        raise DoesNotFit(
            f"{what} is sent in half precision and holds {largest:.3g}; the largest number it can "
            f"hold is {LARGEST:g}."
        )
