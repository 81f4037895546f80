"""Size of a payload, in bytes of tensors by kind, from its schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fcil_adapters.contract.traffic import Largest
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import WIRE_DTYPES, Array, Payload, pieces
from fcil_protocol.payloads.schema import PayloadSchema, TensorSpec

_A_NUMBER = 0.123456789  # of metadata


@dataclass(frozen=True)
class Size:
    """Bytes by payload kind; ``exact`` or the largest possible.

    Attributes:
        frame: bytes of a payload besides its tensors: their names, shapes and places.
        compact_frame: the same in the compact form.
    """

    kinds: Mapping[str, int]
    exact: bool = True
    frame: int = field(default=0, compare=False)
    compact_frame: int = field(default=0, compare=False)

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())

    def __add__(self, other: Size) -> Size:
        kinds = Counter(self.kinds)
        kinds.update(other.kinds)
        # Empty sizes do not affect the exactness of a sum.
        exact = all(size.exact for size in (self, other) if size.bytes)
        frames = self.frame + other.frame, self.compact_frame + other.compact_frame
        return Size(dict(kinds), exact, *frames)

    def times(self, count: int, per: int = 1) -> Size:
        """Return the size of ``count / per`` such payloads."""
        kinds = {kind: round(count * size / per) for kind, size in self.kinds.items()}
        return Size({kind: size for kind, size in kinds.items() if size}, self.exact)

    def fields(self) -> dict[str, Any]:
        """Return plain data."""
        return {"bytes": self.bytes, "at_most": not self.exact, "kinds": dict(self.kinds)}


NOTHING = Size({})


def size_of(schema: PayloadSchema, dims: Mapping[str, int], bounds: Largest) -> Size:
    """Return the largest size of a payload of this schema.

    Raises:
        ConfigError: the schema leaves a size without bound.
    """
    kinds: Counter[str] = Counter()
    exact = True
    largest: dict[str, Array] = {}  # zeros that nothing touches take no memory
    for spec in schema.tensors:
        if not (spec.optional and spec.name in bounds.without_tensors):
            alone = PayloadSchema((spec,), at_most=schema.at_most)
            try:
                (bound,) = alone.bounds({**bounds.sizes, **dims})
            except KeyError as error:
                raise ConfigError(
                    f"tensor {spec.name!r}: nothing bounds the size {error} in its schema.",
                    action="Name it in the method's dims, or in the schema's at_most.",
                ) from error
            kinds[spec.kind.value] += bound.bytes
            largest[spec.name] = np.zeros(bound.shape, WIRE_DTYPES[spec.dtype])
            exact &= _is_fixed(spec, dims)
    payload = Payload(largest, {spec.name: _A_NUMBER for spec in schema.meta})
    frames = (len(pieces(payload, compact=compact)[0]) for compact in (False, True))
    return Size({kind: size for kind, size in kinds.items() if size}, exact, *frames)


def _is_fixed(spec: TensorSpec, dims: Mapping[str, int]) -> bool:
    return not spec.optional and all(isinstance(s, int) or s in dims for s in spec.shape)
