"""Each client's sums apart, and the classifier without one of them (torch-free).

What a client added can be taken away again exactly as long as it is known: the classifier is
then, to the last bit, that of a federation in which the client never was.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcil_adapters.contract import State
from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.methods.analytic.solving import solve
from fcil_adapters.methods.analytic.sums import Sums, add_up
from fcil_protocol.errors import DataError
from fcil_protocol.ids import ClientId
from fcil_protocol.payload import Array

_CLIENT = "client."


def with_client(state: State, client: ClientId, more: Sums) -> State:
    """Return the state with more sums of a client."""
    name = _CLIENT + client
    known = [Sums.read(state.tensors, name)] if client in kept_clients(state) else []
    return State({**state.tensors, **sum(known, more).tensors(name)}, state.meta)


def kept_clients(state: State) -> list[ClientId]:
    """Return whose sums a state keeps apart, sorted."""
    names = {n.split(".")[1] for n in state.tensors if n.startswith(_CLIENT)}
    return [ClientId(name) for name in sorted(names)]


def client_sums(state: State) -> Iterator[Sums]:
    """Yield the sums that a state keeps apart, in ClientId order."""
    for client in kept_clients(state):
        yield Sums.read(state.tensors, _CLIENT + client)


def without(h: AnalyticHparams, state: State, client: ClientId) -> State:
    """Return the state as if a client had never sent anything.

    With ``weights = "capped"`` the others keep the weights that they had beside it; with
    ``truncate`` what is removed is what it sent.

    Raises:
        DataError: the state does not keep the client's sums apart.
    """
    if not h.keep_client_sums:
        raise DataError(
            "clients' sums were added up and not kept, so none can be taken out again.",
            action="Set method.keep_client_sums to true and begin a new run.",
        )
    if client not in kept_clients(state):
        raise DataError(f"the state keeps nothing of the client {client}.")
    gone = f"{_CLIENT}{client}."
    left = State({n: a for n, a in state.tensors.items() if not n.startswith(gone)}, state.meta)
    width = state.tensors["weight"].shape[1]
    return with_rows(h, left, add_up(width, client_sums(left)))


def with_rows(h: AnalyticHparams, state: State, total: Sums) -> State:
    """Return the state with the classifier that the total gives."""
    classes, weight = solve(h, total)
    rows: dict[str, Array] = {"classes": classes, "weight": weight.astype(np.float32)}
    return State({**state.tensors, **rows}, state.meta)
