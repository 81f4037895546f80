"""Updates that start from an older state, moved to the current one (FedBuff).

John Nguyen et al.: Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022,
https://arxiv.org/abs/2106.06639. Their server adds the weighted changes of the clients to its
model; here the change of a client that trained from an older state is added to the current state's
tensors before the method sees the update, so any rule of averaging and the search for outliers work
as with updates of one state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fcil_adapters.contract import State
from fcil_protocol.errors import CorruptFile
from fcil_protocol.payloads.payload import Array, Payload

if TYPE_CHECKING:  # the worker, which moves updates, does without it
    from fcil_server.ledger.rows import UpdateRow

Tensors = Mapping[str, Array]


def damping(staleness: int) -> float:
    """Return the factor of a change that starts this many states back: 1 / sqrt(1 + tau)."""
    return float(1 / np.sqrt(1 + staleness))


@dataclass(frozen=True)
class Rebase:
    """Moves updates from the states that they start from to the current one.

    Attributes:
        current: the current state's `AveragingAggregator.start`.
        older: staleness -> that of the state this many states back.
        ages: staleness of each update, by its number.
    """

    current: Tensors
    older: Mapping[int, Tensors]
    ages: Sequence[int]

    def __call__(self, number: int, payload: Payload) -> Payload:
        """Return ``W_r + damping (W_k - W_s)`` for each tensor W that clients train.

        Args:
            number: of the update.
            payload: the update, in float32.
        """
        age = self.ages[number]
        if age == 0:
            return payload
        older, factor = self.older[age], damping(age)
        moved = {
            name: _moved(array, older[name], self.current[name], factor)
            for name, array in payload.tensors.items()
            if name in self.current
        }
        return replace(payload, tensors={**payload.tensors, **moved})


def _moved(trained: Array, older: Array, current: Array, factor: float) -> Array:
    change = trained.astype(np.float64) - older.astype(np.float64)
    return np.asarray(current.astype(np.float64) + factor * change, dtype=np.float32)


def unmoved(_number: int, payload: Payload) -> Payload:
    """Return an update of a round in which all start from the current state."""
    return payload


Move = Callable[[int, Payload], Payload]


@dataclass(frozen=True)
class OlderStates:
    """The states before the current one that some updates of a round start from.

    Attributes:
        current: number of the state that the round starts from.
        states: number -> state.
    """

    current: int = 0
    states: Mapping[int, State] = field(default_factory=dict)

    def staleness(self, base: int | None) -> int:
        """Return how many states an update's start lies before the current state."""
        return 0 if base is None else self.current - base


NO_OLDER_STATES = OlderStates()


def load_older(
    load: Callable[[int], State], current: int, updates: Iterable[UpdateRow]
) -> tuple[OlderStates, dict[int, CorruptFile]]:
    """Load the older states that updates start from.

    Args:
        load: returns a state by its number (`StateStore.load`).
        current: number of the state that the round starts from.
        updates: of the round.

    Returns:
        The states, and for each that cannot be read the reason.
    """
    states: dict[int, State] = {}
    unreadable: dict[int, CorruptFile] = {}
    bases = {u.base_state for u in updates if u.base_state is not None}
    for number in sorted(bases - {current}):
        try:
            states[number] = load(number)
        except CorruptFile as error:
            unreadable[number] = error
    return OlderStates(current, states), unreadable
