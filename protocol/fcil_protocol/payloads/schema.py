"""Schemas: the tensors that an exchange may carry, with kind, shape, dtype and bounds.

The same schema guards the client's uploads (egress) and the server's (intake). ``check`` lists
every difference at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from fcil_protocol.payloads.payload import WIRE_DTYPES, Array, Payload


class Kind(StrEnum):
    """Meaning of a tensor; tensors of other kinds never leave a client (PROTOCOL.md 6.2)."""

    LORA = "lora"
    PROMPT = "prompt"
    KEY = "key"
    PROTOTYPE = "prototype"
    GAUSSIAN = "gaussian"
    GRAM = "gram"
    HEAD = "head"
    RESIDUAL = "residual"
    IMPORTANCE = "importance"
    COUNT = "count"
    METRIC = "metric"
    SUM = "sum"  # of several clients' tensors, in fixed point
    MASKED = "masked"  # a sum, hidden by random numbers that cancel in the total
    MASK = "mask"  # public keys and sealed shares of these


Dim = int | str


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a schema.

    Attributes:
        name: the exact name in the payload.
        kind: its meaning.
        shape: numbers, or symbols. A symbol with a value in ``dims`` (``d``, ``classes``) must have
            that value; another symbol takes its value from the first tensor that uses it, must be
            the same everywhere, and may not exceed ``at_most[symbol]``.
        dtype: wire dtype, a key of ``WIRE_DTYPES``.
        max_abs: largest allowed absolute value of an element (floats only).
        non_negative: elements must be >= 0 (counts).
        optional: may be left out.
        exact: a statistic for further computation: it never travels in half precision, regardless
            of its kind. Not part of the digest; the resulting dtype is.
    """

    name: str
    kind: Kind
    shape: tuple[Dim, ...]
    dtype: str = "F32"
    max_abs: float = 1e4
    non_negative: bool = False
    optional: bool = False
    exact: bool = False


@dataclass(frozen=True)
class MetaSpec:
    """One metadata field: ``int``, ``float``, ``bool``, ``ints`` or ``class_names``."""

    name: str
    type: str
    optional: bool = False


@dataclass(frozen=True)
class TensorBound:
    """The largest form that a schema allows one tensor; ``exact`` if it has no other."""

    spec: TensorSpec
    shape: tuple[int, ...]
    exact: bool

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return WIRE_DTYPES[self.spec.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class PayloadSchema:
    """The allowed content of a payload of one exchange and direction."""

    tensors: tuple[TensorSpec, ...] = ()
    meta: tuple[MetaSpec, ...] = ()
    at_most: tuple[tuple[str, str], ...] = ()  # (free symbol, known symbol that bounds it)

    def digest(self) -> str:
        """Return the SHA-256 of the schema's canonical text (hex)."""
        text = json.dumps(
            {
                "tensors": [
                    [t.name, t.kind, list(t.shape), t.dtype, t.max_abs, t.non_negative, t.optional]
                    for t in self.tensors
                ],
                "meta": [[m.name, m.type, m.optional] for m in self.meta],
                "at_most": [list(pair) for pair in self.at_most],
            },
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def bounds(self, dims: Mapping[str, int]) -> tuple[TensorBound, ...]:
        """Return the largest form of each tensor, in the schema's order.

        Raises:
            KeyError: a size has no bound.
        """
        limits = {**{free: dims[known] for free, known in self.at_most}, **dims}
        return tuple(
            TensorBound(
                spec,
                tuple(s if isinstance(s, int) else limits[s] for s in spec.shape),
                exact=not spec.optional
                and all(isinstance(s, int) or s in dims for s in spec.shape),
            )
            for spec in self.tensors
        )

    def max_bytes(self, dims: Mapping[str, int]) -> int:
        """Return the size of the largest allowed payload in bytes, tensors only."""
        return sum(bound.bytes for bound in self.bounds(dims))

    def check(self, payload: Payload, dims: Mapping[str, int]) -> list[str]:
        """Return one sentence for every way in which the payload breaks the schema."""
        extra = sorted(set(payload.tensors) - {t.name for t in self.tensors})
        faults = [f"tensor {name[:80]!r} is not in the schema" for name in extra]
        bound: dict[str, int] = dict(dims)
        limits = {free: dims[top] for free, top in self.at_most if top in dims}
        for spec in self.tensors:
            array = payload.tensors.get(spec.name)
            if array is None:
                if not spec.optional:
                    faults.append(f"tensor {spec.name!r} is missing")
                continue
            faults.extend(_check_tensor(spec, array, bound, limits))
        faults.extend(_check_meta(self.meta, payload))
        return faults

    def check_upload(self, payload: Payload, dims: Mapping[str, int]) -> list[str]:
        """Check one client's upload: `check`, and no count above `MAX_COUNT`.

        A server's broadcast may hold sums over clients and rounds.
        """
        faults = self.check(payload, dims)
        for spec in self.tensors if not faults else ():
            array = payload.tensors.get(spec.name)
            if spec.kind is not Kind.COUNT or array is None or array.size == 0:
                continue
            if int(np.max(array)) > MAX_COUNT:
                faults.append(f"tensor {spec.name!r} holds a count above {MAX_COUNT}")
        return faults


def _check_tensor(
    spec: TensorSpec, array: Array, bound: dict[str, int], limits: Mapping[str, int]
) -> list[str]:
    expected = WIRE_DTYPES[spec.dtype]
    if array.dtype != expected:
        return [f"tensor {spec.name!r}: expected dtype {expected}, got {array.dtype}"]
    wanted = tuple(s if isinstance(s, int) else bound.get(s, s) for s in spec.shape)
    if len(array.shape) != len(wanted):
        return [f"tensor {spec.name!r}: expected shape {wanted}, got {array.shape}"]
    fresh: dict[str, int] = {}
    for size, got in zip(wanted, array.shape, strict=True):
        if isinstance(size, str):
            if got > limits.get(size, got) or fresh.get(size, got) != got:
                return [
                    f"tensor {spec.name!r}: expected {size} <= {limits.get(size)}, got {got} rows"
                ]
            fresh[size] = got
        elif size != got:
            return [f"tensor {spec.name!r}: expected shape {wanted}, got {array.shape}"]
    bound.update(fresh)
    if array.size == 0:
        return []
    if array.dtype.kind == "f":
        largest = _largest(array)
        if not math.isfinite(largest):
            return [f"tensor {spec.name!r} holds NaN or infinity"]
        if largest > spec.max_abs:
            return [f"tensor {spec.name!r}: largest value {largest:.3g} exceeds {spec.max_abs:g}"]
    elif spec.non_negative and int(np.min(array)) < 0:
        return [f"tensor {spec.name!r} holds a negative number"]
    return []


def _largest(array: Array) -> float:
    """Return the largest absolute value; a NaN or an infinity anywhere makes it non-finite.

    No copy of the array's size is made: `np.abs` alone takes twice as long as both searches.
    """
    if array.dtype == np.float16:  # compared as integers without their sign bits
        bits = np.max(array.view(np.uint16) & np.uint16(0x7FFF))
        return float(np.uint16(bits).view(np.float16))
    return max(abs(float(np.max(array))), abs(float(np.min(array))))


def _check_meta(specs: Sequence[MetaSpec], payload: Payload) -> list[str]:
    extra = sorted(set(payload.meta) - {s.name for s in specs})
    faults = [f"field {name[:80]!r} is not in the schema" for name in extra]
    for spec in specs:
        if spec.name not in payload.meta:
            if not spec.optional:
                faults.append(f"field {spec.name!r} is missing")
        elif not _META_CHECKS[spec.type](payload.meta[spec.name]):
            faults.append(f"field {spec.name!r} is not of type {spec.type}")
    return faults


def _is_int(value: object) -> bool:
    # JSON has integers of any size; on the wire they fit into 64 bits.
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_float(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST_FLOAT  # false for NaN; no overflow for a huge integer


_LARGEST_FLOAT = float(np.finfo(np.float64).max)
_META_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": lambda v: isinstance(v, bool),
    "ints": lambda v: isinstance(v, list) and all(_is_int(x) for x in v),
    "class_names": lambda v: (
        isinstance(v, list)
        and len(v) <= MAX_CLASS_NAMES
        and all(isinstance(x, str) and class_name_fault(x) is None for x in v)
    ),
}

# No client has this many images or classes; sums over clients and rounds stay in 64 bits.
MAX_COUNT = 10**9
MAX_CLASS_NAMES = 10_000
MAX_CLASS_NAME_BYTES = 128
_MAX_NORMALISED = 1024  # characters: normalisation takes quadratic time; file names are shorter


def normalise_class_name(name: str) -> str:
    """Return the form in which class names are stored: NFC, trimmed; too long ones stay as is."""
    return unicodedata.normalize("NFC", name).strip() if len(name) <= _MAX_NORMALISED else name


@lru_cache(maxsize=4096)  # called for each image
def class_key(name: str) -> str:
    """Return the form by which class names are matched: normalised and case-folded."""
    return normalise_class_name(normalise_class_name(name).casefold())


def class_name_fault(name: str) -> str | None:
    """Return the fault of a class name, or None.

    Names are NFC, trimmed, printable and at most 128 bytes of UTF-8 (PROTOCOL.md 6.2).
    """
    if len(name) > MAX_CLASS_NAME_BYTES:  # before work that grows with its length
        return f"a class name must be at most {MAX_CLASS_NAME_BYTES} bytes"
    if not name or name != normalise_class_name(name):
        return "a class name must be non-empty, trimmed and in Unicode NFC"
    if not name.isprintable():
        return "a class name must be printable"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "a class name must be valid Unicode"
    if size > MAX_CLASS_NAME_BYTES:
        return f"a class name must be at most {MAX_CLASS_NAME_BYTES} bytes"
    return None
