"""Limits on uploads that no method's manifest can lift (PROTOCOL.md 6.2).

A payload is checked against its schema, and the schema against the rules here: so a method can
neither send undeclared data nor declare forbidden data. The rules stop accidents and wrong code,
but not a method that hides data in numbers (docs/egress.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from fcil_protocol.payloads.builtin import TRAINING_METRICS
from fcil_protocol.payloads.payload import WIRE_DTYPES
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

# Single values. A list has no length in the schema, and a list of names is text.
META_TYPES = ("int", "float", "bool")


def schema_faults(schema: PayloadSchema, known: Collection[str]) -> list[str]:
    """Return one sentence for every forbidden declaration of a method's upload.

    Args:
        schema: schema of one exchange's upload.
        known: the symbols with values in the method's ``dims``.
    """
    bounded = {free for free, top in schema.at_most if top in known}.union(known)
    faults = declaration_faults(schema)
    faults += [
        f"tensor {spec.name[:80]!r}: nothing bounds its size {size[:40]!r}"
        for spec in schema.tensors
        for size in spec.shape
        if isinstance(size, str) and size not in bounded
    ]
    faults += [
        f"field {spec.name[:80]!r} is of type {spec.type[:40]!r}, allowed are "
        f"{', '.join(META_TYPES)}"
        for spec in schema.meta
        if spec.type not in META_TYPES
    ]
    faults += [
        f"field {spec.name!r} is the protocol's own"
        for spec in schema.meta
        if spec.name in TRAINING_METRICS
    ]
    faults += [
        f"tensor {spec.name[:80]!r} is of kind {Kind.SUM.value!r}, which relays alone send"
        for spec in schema.tensors
        if spec.kind is Kind.SUM
    ]
    return faults


def declaration_faults(schema: PayloadSchema) -> list[str]:
    """Return one sentence for every tensor that no payload of either direction may have."""
    times = Counter(spec.name for spec in schema.tensors)
    twice = [f"tensor {name[:80]!r} is declared {n} times" for name, n in times.items() if n > 1]
    return [*twice, *(fault for spec in schema.tensors for fault in _tensor_faults(spec))]


def _tensor_faults(spec: TensorSpec) -> list[str]:
    name = spec.name[:80]
    faults = []
    if str(spec.kind) not in {kind.value for kind in Kind}:
        faults.append(
            f"tensor {name!r} is of kind {str(spec.kind)[:40]!r}, allowed are {', '.join(Kind)}"
        )
    if spec.dtype not in WIRE_DTYPES:
        faults.append(
            f"tensor {name!r} has dtype {spec.dtype[:40]!r}, allowed are {', '.join(WIRE_DTYPES)}"
        )
    if not math.isfinite(spec.max_abs):
        faults.append(f"tensor {name!r} has no finite bound on its values")
    faults += [
        f"tensor {name!r}: its size {str(size)[:40]} is neither a whole number nor a symbol"
        for size in spec.shape
        if not isinstance(size, int | str)
    ]
    return faults
