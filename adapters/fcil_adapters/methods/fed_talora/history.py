"""The state's history of residuals: a dense base and the factors since (torch).

Catching up is exact because it does not depend on a client's own past: a client at a state adds up
the very parts that this state's broadcast names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fcil_adapters.contract import BackboneInfo, Part, Payload, State
from fcil_adapters.methods.fed_talora.options import FedTaloraHparams
from fcil_adapters.methods.fed_talora.parts import (
    F32,
    base_part,
    dense_bytes,
    residual_part,
)
from fcil_adapters.methods.fed_talora.residuals import Residual
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.manifest import places


def position(state: State) -> tuple[int, int]:
    """Return the number of residuals (the version), and of those in the dense base."""
    version, base = state.meta["version"], state.meta["base"]
    assert isinstance(version, int)
    assert isinstance(base, int)
    return version, base


def total(
    place: str, base: Mapping[str, F32], log: tuple[Mapping[str, F32], ...], device: str
) -> Tensor | None:
    """Return base + sum of L R of one place in float64 (out, in); None without either."""
    L = [to_torch(one[f"{place}.L"], device, torch.float64) for one in log]
    R = [to_torch(one[f"{place}.R"], device, torch.float64) for one in log]
    start = to_torch(base[place], device, torch.float64) if place in base else None
    if not log:
        return start
    product = torch.cat(L, 1) @ torch.cat(R, 0)
    return product if start is None else start + product


def extended(
    state: State, residual: Residual, h: FedTaloraHparams, backbone: BackboneInfo, device: str
) -> State:
    """Return the state with a round's residual, and one version more unless that is zero."""
    rolls = h.catch_up == "cheapest"
    if h.residual == "dense" or (residual.wide and rolls):
        dense = residual.dense()
        return _rolled(state, h, device, dense) if dense else state
    factors = residual.factors()
    if not factors:
        return state
    version = position(state)[0]
    new = {
        f"residual.{version + 1}.{place}.{name}": factor
        for place, pair in factors.items()
        for name, factor in zip("LR", pair, strict=True)
    }
    tensors = {**state.tensors, **new}
    longer = State(tensors, {**state.meta, "version": version + 1})
    size = sum(a.nbytes for n, a in tensors.items() if n.startswith("residual."))
    if rolls and size >= dense_bytes(h, backbone):
        return _rolled(longer, h, device, {})
    return longer


def residual_parts(state: State) -> tuple[Part, ...]:
    """Return the dense base, if there is one, and one part per residual since."""
    version, base = position(state)
    parts = []
    if base:
        parts.append(Part(base_part(base), Payload(_named(state, "base."), {"version": base})))
    for n in range(base + 1, version + 1):
        factors = _named(state, f"residual.{n}.")
        parts.append(Part(residual_part(n), Payload(factors, {"version": n})))
    return tuple(parts)


def _named(state: State, prefix: str) -> dict[str, F32]:
    return {
        name.removeprefix(prefix): state.f32(name)
        for name in state.tensors
        if name.startswith(prefix)
    }


def _rolled(state: State, h: FedTaloraHparams, device: str, more: Mapping[str, Tensor]) -> State:
    """Return the state with base, log and a dense residual added up; the log is then empty."""
    version, base = position(state)
    old = _named(state, "base.")
    log = tuple(_named(state, f"residual.{n}.") for n in range(base + 1, version + 1))
    kept = {n: a for n, a in state.tensors.items() if not n.startswith(("base.", "residual."))}
    for place in places(h):
        terms = [t for t in (total(place, old, log, device), more.get(place)) if t is not None]
        kept[f"base.{place}"] = to_numpy(torch.stack(terms).sum(0))
    version += 1 if more else 0
    return State(kept, {**state.meta, "version": version, "base": version})
