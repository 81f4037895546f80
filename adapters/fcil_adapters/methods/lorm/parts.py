"""LoRM's statistics and parts: names, shapes, schemas, reading (torch-free).

A *root* is a matrix R with ``R^T R = G``, the mean product of a layer's inputs over all tokens of
a client's images. Roots travel instead of Gram matrices: no upload can then be indefinite, and
float32 keeps the small eigenvalues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo, Kind, Payload, TensorSpec
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.numerics.symmetric import triangle_size
from fcil_adapters.numerics.task_parts import CURRENT, current_task, find_part
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.lora.manifest import places
from fcil_adapters.toolkit.lora.tensors import lora_of, module_shape

F64 = NDArray[np.float64]

LORA = "lora"  # kind of part: the LoRA of a finished task
GRAM = "gram"  # kind of part: the squared inputs of a task's layers
HEAD_ROOT = "root.head"
IMAGES = "images"


def root_name(name: str) -> str:
    """Return the name of the root that goes with ``lora.<place>.<A|B>`` or ``head.weight``."""
    return HEAD_ROOT if name.startswith("head.") else f"root.{name.removeprefix('lora.')}"


def root_names(h: LormHparams, factor: str) -> tuple[str, ...]:
    """Return the roots of all places in a round that trains a factor."""
    return tuple(f"root.{place}.{factor}" for place in places(h))


def root_specs(
    names: Iterable[str], backbone: BackboneInfo, *, optional: bool = False
) -> tuple[TensorSpec, ...]:
    """Return the specs of roots: an upper triangle of the r inputs of B, or a diagonal for A.

    They are means over tokens, so their sizes can be compared between clients: kind ``gaussian``.
    """
    specs = []
    for name in names:
        shape: tuple[int | str, ...]
        if name == HEAD_ROOT:
            shape = ("d_triangle",)
        elif name.endswith(".B"):
            shape = ("r_triangle",)
        else:
            shape = (module_shape(name.split(".")[2], backbone)[1],)
        specs.append(TensorSpec(name, Kind.GAUSSIAN, shape, optional=optional, exact=True))
    return tuple(specs)


@dataclass(frozen=True)
class TaskLora:
    """The LoRA of one task.

    Attributes:
        lora: `lora.manifest.factor_names` -> (r, in) or (out, r).
        squares: place -> sums of squares of the inputs over the task's images, (in,), up to a
            factor common to all tasks; None: no client measured them.
    """

    lora: Mapping[str, F32]
    squares: Mapping[str, F64] | None = None

    @property
    def trained(self) -> bool:
        """True if B is not zero everywhere, as it is drawn."""
        return any(array.any() for name, array in self.lora.items() if name.endswith(".B"))


def lora_part(task: int) -> str:
    """Return the name of the part with a finished task's LoRA."""
    return f"{LORA}/{task}"


def gram_part(task: int) -> str:
    """Return the name of the part with the squared inputs of a task's layers."""
    return f"{GRAM}/{task}"


def read_tasks(h: LormHparams, broadcast: Mapping[str, Payload]) -> tuple[TaskLora, ...]:
    """Return the tasks that trained a LoRA, in order, then the current one.

    Raises:
        SchemaMismatch: the current part is missing.
    """
    current = find_part(broadcast, CURRENT)
    last = current_task(current)
    sources = [(t, broadcast.get(lora_part(t))) for t in range(last)]
    found = [(t, part) for t, part in sources if part is not None]
    return tuple(
        TaskLora(lora_of(part), _squares(h, broadcast.get(gram_part(t))))
        for t, part in [*found, (last, current)]
    )


def _squares(h: LormHparams, part: Payload | None) -> dict[str, F64] | None:
    if part is None:
        return None
    images = int(part.i64(IMAGES)[0])
    return {
        place: images * np.square(part.f32(f"root.{place}.A"), dtype=np.float64)
        for place in places(h)
    }


def no_roots(h: LormHparams, backbone: BackboneInfo, names: Iterable[str]) -> dict[str, F32]:
    """Return zeros in the shapes of roots: they say nothing of any image."""
    sizes = {"d_triangle": triangle_size(backbone.dim), "r_triangle": triangle_size(h.rank)}
    return {
        spec.name: np.zeros(
            [s if isinstance(s, int) else sizes[s] for s in spec.shape], dtype=np.float32
        )
        for spec in root_specs(names, backbone)
    }
