"""Names of Fed-TaLoRA's tensors and parts, sizes, and reading a broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.lora_tensors import lora_names, lora_of, lora_places, module_of, module_shape
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.tasks import CURRENT, current_task, find_part, meta_number, task_part
from fcil_protocol.payload import Array, Payload

F32 = NDArray[np.float32]
FIXED = "fixed"  # the part with the A's that no client trains
HEAD_TENSORS = ("head.weight", "head.bias", "classes", "seen")
FLOAT_BYTES = 4


def places(h: FedTaloraHparams) -> tuple[str, ...]:
    """Return ``<block>.<module>`` for every adapted matrix, in a fixed order."""
    return lora_places(h.blocks, h.modules)


def factor_names(h: FedTaloraHparams, *, of: str = "AB") -> tuple[str, ...]:
    """Return ``lora.<block>.<module>.<A|B>`` for the factors named in ``of``."""
    return lora_names(places(h), of)


def trained_names(h: FedTaloraHparams) -> tuple[str, ...]:
    """Return the LoRA tensors that clients train and send."""
    return factor_names(h, of="B" if h.freeze_a else "AB")


def dense_bytes(h: FedTaloraHparams, backbone: BackboneInfo) -> int:
    """Return the size of one dense sum of residuals."""
    shapes = [module_shape(module_of(place), backbone) for place in places(h)]
    return FLOAT_BYTES * sum(out * width for out, width in shapes)


def residual_part(version: int) -> str:
    """Return the name of the part with the factors that make base ``version``."""
    return f"residual/{version}"


def base_part(version: int) -> str:
    """Return the name of the part with the dense sum of all residuals up to ``version``."""
    return f"base/{version}"


@dataclass(frozen=True)
class HeadRows:
    """The linear head's rows of one task, or of all seen classes.

    Attributes:
        weight: (c, d), in the order of ``classes``.
        bias: (c,).
        classes: (c,) global ids.
        seen: (c,), whether anybody ever had an image of the class.
    """

    weight: F32
    bias: F32
    classes: NDArray[np.int64]
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, tensors: Mapping[str, Array]) -> HeadRows:
        """Read the `HEAD_TENSORS`."""
        return cls(
            np.asarray(tensors["head.weight"], dtype=np.float32),
            np.asarray(tensors["head.bias"], dtype=np.float32),
            np.asarray(tensors["classes"], dtype=np.int64),
            np.asarray(tensors["seen"], dtype=np.int64).astype(bool),
        )

    def chosen(self, rows: NDArray[np.bool_]) -> HeadRows:
        """Return some of the rows."""
        return HeadRows(self.weight[rows], self.bias[rows], self.classes[rows], self.seen[rows])

    @classmethod
    def joined(cls, many: tuple[HeadRows, ...]) -> HeadRows:
        """Return the rows of several tasks below each other."""
        return cls(
            np.concatenate([one.weight for one in many]),
            np.concatenate([one.bias for one in many]),
            np.concatenate([one.classes for one in many]),
            np.concatenate([one.seen for one in many]),
        )


@dataclass(frozen=True)
class Received:
    """A whole broadcast.

    Attributes:
        version: how many residuals the base holds; an upload names it.
        lora: `factor_names` -> (r, in) or (out, r).
        base: place -> (out, in), or nothing.
        residuals: the factors since the base, in order: ``<place>.L`` (out, R), ``.R`` (R, in).
        tasks: finished tasks' rows in order, then the current ones.
    """

    version: int
    lora: Mapping[str, F32]
    base: Mapping[str, F32]
    residuals: tuple[Mapping[str, F32], ...]
    tasks: tuple[HeadRows, ...]


def read_parts(h: FedTaloraHparams, broadcast: Mapping[str, Payload]) -> Received:
    """Read a broadcast.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    current = find_part(broadcast, CURRENT)
    version, base = meta_number(current, "version"), meta_number(current, "base")
    fixed = find_part(broadcast, FIXED) if h.freeze_a else Payload()
    finished = 0 if h.head_loss == "all" else current_task(current)
    heads = [find_part(broadcast, task_part(t)) for t in range(finished)]
    dense = find_part(broadcast, base_part(base)) if base else Payload()
    log = [find_part(broadcast, residual_part(n)) for n in range(base + 1, version + 1)]
    return Received(
        version=version,
        lora={**lora_of(current), **lora_of(fixed)},
        base=_floats(dense),
        residuals=tuple(_floats(part) for part in log),
        tasks=tuple(HeadRows.of(part.tensors) for part in (*heads, current)),
    )


def _floats(payload: Payload) -> dict[str, F32]:
    return {name: payload.f32(name) for name in payload.tensors}


def is_wide(width: int, shapes: Iterable[tuple[int, int]]) -> bool:
    """Say whether factors of ``width`` columns can have the full rank of a matrix (out, in).

    Beyond that, a dense sum costs the server less than ever wider stacks.
    """
    return width >= min(min(shape) for shape in shapes)
