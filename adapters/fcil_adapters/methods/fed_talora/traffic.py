"""Largest traffic of Fed-TaLoRA within its schemas (torch-free)."""

from __future__ import annotations

from fcil_adapters.contract import BackboneInfo, Largest, TaskInfo
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import is_wide
from fcil_adapters.toolkit.lora.manifest import places
from fcil_adapters.toolkit.lora.tensors import module_of, module_shape


def largest(h: FedTaloraHparams, backbone: BackboneInfo, task: TaskInfo, clients: int) -> Largest:
    """Return the ranks (K - 1) r of K clients' residuals, and the forms that are sent.

    The mean feature is sent in tasks of a single class only, and these have no residual.
    """
    shapes = {place: module_shape(module_of(place), backbone) for place in places(h)}
    ranks = {
        f"rank.{place}": min((clients - 1) * h.rank, *shape) for place, shape in shapes.items()
    }
    if h.single_column(task):
        return Largest(ranks, without_parts=("residual", "base"))
    # As `residuals.Residual`: factors of this width are kept as a dense sum.
    wide = is_wide((clients + 1) * h.rank, shapes.values())
    return Largest(ranks, ("mean",), _without(h, clients, wide=wide))


def _without(h: FedTaloraHparams, clients: int, *, wide: bool) -> tuple[str, ...]:
    if clients == 1:
        return ("residual", "base")
    if h.residual == "dense":
        return ("residual",)
    if h.catch_up == "factors":
        return ("base",)
    return ("residual",) if wide else ()
