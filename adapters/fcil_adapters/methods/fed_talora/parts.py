"""Names of Fed-TaLoRA's residuals, their sizes, and reading a broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo, Context, Payload
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.numerics.task_parts import CURRENT, find_part, meta_number
from fcil_adapters.toolkit.lora import manifest as lora_head
from fcil_adapters.toolkit.lora.low_rank import Change, Changes, lora_changes
from fcil_adapters.toolkit.lora.manifest import places
from fcil_adapters.toolkit.lora.tensors import module_of, module_shape

F32 = NDArray[np.float32]
FLOAT_BYTES = 4


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
class Received:
    """A complete broadcast.

    Attributes:
        version: number of residuals in the base; an upload names it.
        base: place -> (out, in), or nothing.
        residuals: the factors since the base, in order: ``<place>.L`` (out, R), ``.R`` (R, in).
        room: LoRA and head rows.
    """

    version: int
    base: Mapping[str, F32]
    residuals: tuple[Mapping[str, F32], ...]
    room: lora_head.LoraBroadcast

    @property
    def lora(self) -> Mapping[str, F32]:
        """`lora.manifest.factor_names` -> (r, in) or (out, r)."""
        return self.room.lora


def read_parts(h: FedTaloraHparams, broadcast: Mapping[str, Payload]) -> Received:
    """Read a broadcast.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    current = find_part(broadcast, CURRENT)
    version, base = meta_number(current, "version"), meta_number(current, "base")
    dense = find_part(broadcast, base_part(base)) if base else Payload()
    log = [find_part(broadcast, residual_part(n)) for n in range(base + 1, version + 1)]
    return Received(
        version=version,
        base=_floats(dense),
        residuals=tuple(_floats(part) for part in log),
        room=lora_head.read_parts(h, broadcast),
    )


def weight_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return B A with the residuals: their factors as further pairs, the base as a matrix."""
    h: FedTaloraHparams = ctx.hparams
    received = read_parts(h, broadcast)
    plain = lora_changes(ctx, broadcast)
    further = {
        place: tuple((one[f"{place}.R"], one[f"{place}.L"]) for one in received.residuals)
        for place in plain.places
    }
    return Changes(
        plain.scale,
        {
            place: Change((*change.pairs, *further[place]), received.base.get(place))
            for place, change in plain.places.items()
        },
    )


def _floats(payload: Payload) -> dict[str, F32]:
    return {name: payload.f32(name) for name in payload.tensors}


def is_wide(width: int, shapes: Iterable[tuple[int, int]]) -> bool:
    """Return True if factors of ``width`` columns can have a matrix's (out, in) full rank.

    Beyond that, a dense sum costs the server less than ever wider stacks.
    """
    return width >= min(min(shape) for shape in shapes)
