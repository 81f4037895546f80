"""LoRA tensors in payloads: names, shapes, schemas, and their first values (torch-free).

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022,
https://arxiv.org/abs/2106.09685. A *place* is ``<block>.<module>``, such as ``0.q`` or
``3.fc1``; its factors are ``lora.<place>.A`` (r, in) and ``lora.<place>.B`` (out, r). timm
computes q, k and v of a block by one Linear (d -> 3d), so a *module* is a Linear or an equal slice
of its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, TensorSpec

F32 = NDArray[np.float32]
InitA = Literal["uniform", "gaussian"]
T = TypeVar("T")


@dataclass(frozen=True)
class AdaptedLinear:
    """A Linear of a block that holds adapted modules: itself by its name, or slices of its output.

    Attributes:
        owner, name: its path: ``block.<owner>.<name>``.
        thirds: names of the equal slices of its output, if these are modules too.
    """

    owner: str
    name: str
    thirds: tuple[str, ...] = ()

    def own(self, modules: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of this Linear's modules."""
        return {m: modules[m] for m in (self.name, *self.thirds) if m in modules}

    def slices(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the equal slices among which these modules of it are."""
        return (self.name,) if not self.thirds or self.name in modules else self.thirds


PLACES = (
    AdaptedLinear("attn", "qkv", ("q", "k", "v")),
    AdaptedLinear("attn", "proj"),
    AdaptedLinear("mlp", "fc1"),
    AdaptedLinear("mlp", "fc2"),
)


def lora_places(blocks: Iterable[int], modules: Iterable[str] = ("q", "v")) -> tuple[str, ...]:
    """Return the places of some modules in some blocks, in a fixed order."""
    wanted = sorted(modules)
    return tuple(f"{block}.{module}" for block in sorted(blocks) for module in wanted)


def lora_names(places: Iterable[str], of: str = "AB") -> tuple[str, ...]:
    """Return the names of the factors ``of`` (``A``, ``B`` or both) at some places."""
    return tuple(f"lora.{place}.{matrix}" for place in places for matrix in of)


def module_of(place: str) -> str:
    """Return the module of a place."""
    return place.partition(".")[2]


def module_shape(module: str, backbone: BackboneInfo) -> tuple[int, int]:
    """Return (out, in) of a module's weight."""
    d, mlp = backbone.dim, backbone.mlp_dim
    return {"qkv": (3 * d, d), "fc1": (mlp, d), "fc2": (d, mlp)}.get(module, (d, d))


def lora_specs(names: Iterable[str], backbone: BackboneInfo) -> tuple[TensorSpec, ...]:
    """Return the specs of LoRA tensors; the symbol ``r`` is the rank."""
    specs = []
    for name in names:
        _, _, module, matrix = name.split(".")
        out, width = module_shape(module, backbone)
        specs.append(TensorSpec(name, Kind.LORA, ("r", width) if matrix == "A" else (out, "r")))
    return tuple(specs)


def draw_lora(
    names: Iterable[str],
    rank: int,
    backbone: BackboneInfo,
    rng: np.random.Generator,
    init_a: InitA = "uniform",
) -> dict[str, F32]:
    """Draw the first LoRA of a run or a task: A random, B = 0, so that B A = 0.

    Args:
        names: `lora_names`.
        rank: r.
        backbone: widths of the modules.
        rng: the only source of randomness.
        init_a: ``uniform``: U(-1/sqrt(in), 1/sqrt(in)), which is Kaiming-uniform with
            a = sqrt(5); ``gaussian``: N(0, 1/in).
    """
    drawn: dict[str, F32] = {}
    for name in names:
        _, _, module, matrix = name.split(".")
        out, width = module_shape(module, backbone)
        bound = 1 / np.sqrt(width)
        if matrix == "B":
            values = np.zeros((out, rank))
        elif init_a == "uniform":
            values = rng.uniform(-bound, bound, (rank, width))
        else:
            values = bound * rng.standard_normal((rank, width))
        drawn[name] = values.astype(np.float32)
    return drawn


def lora_of(payload: Payload) -> Mapping[str, F32]:
    """Return a payload's LoRA tensors by name."""
    return {name: payload.f32(name) for name in payload.tensors if name.startswith("lora.")}
