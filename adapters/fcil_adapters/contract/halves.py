"""The three halves of a method and the values that they exchange.

The learner runs on clients, the aggregator on the server; the model composes a predictor wherever
the global model is used. Workers load all three by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract.context import Context, State
from fcil_adapters.contract.local_images import ImageSet
from fcil_protocol.errors import WorkerError
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Array, Payload


@dataclass(frozen=True)
class Part:
    """One named, immutable piece of a broadcast.

    Part names are ``kind`` or ``kind/number`` (``current``, ``task/3``); the schema of a
    part is the manifest's broadcast schema of its kind. A client keeps parts by digest and
    fetches only those that it lacks, so a part that does not change is sent once.
    """

    name: str
    payload: Payload

    @property
    def kind(self) -> str:
        """Name of its broadcast schema."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Update:
    """One client's accepted contribution to a round."""

    client: ClientId
    payload: Payload


class Updates(Protocol):
    """The accepted updates of a round in ClientId order, opened as they are visited.

    ``samples`` is known before any update is opened, so weighted sums can stream; it may be
    iterated more than once. Tensors are read-only views of the update: a caller that keeps one
    beyond its update's turn copies it, or the entire update stays in memory.
    """

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that contributed, sorted."""
        ...

    @property
    def samples(self) -> tuple[int, ...]:
        """n_k of each, all > 0, in the same order."""
        ...

    def __len__(self) -> int:
        """K, the number of updates."""
        ...

    def __iter__(self) -> Iterator[Update]:
        """Open the updates one after the other."""
        ...


class Learner(Protocol):
    """The client's half."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Take part in one round of ``ctx.kind``.

        Args:
            ctx: everything else; ``ctx.backbone`` is loaded if the method needs one.
            state: this client's state after its last counted update (empty at first).
            broadcast: part name -> payload, all parts of the state that the round starts from.
            data: the train images of the current task's classes, nothing else.

        Returns:
            The new state, provisional until a broadcast names the update as counted, and the
                payload for the exchange's upload schema.
        """
        ...


class Aggregator(Protocol):
    """The server's half."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        ...

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw all random values that task ``ctx.task`` starts with.

        Clients draw no first values (docs/methods/README.md, "First values").
        """
        ...

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine at least one update (float64 inside, float32 out); do not touch ``state``."""
        ...

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return all parts that a client needs at this state, even one that joins late.

        A function of the state alone: unchanged parts must have unchanged bytes.
        """
        ...


class AveragingAggregator(Aggregator, Protocol):
    """The server's half of a method with an averaged exchange (`Exchange.averaged`)."""

    def start(self, ctx: Context, state: State) -> Mapping[str, Array]:
        """Return the tensors that clients train, with the names and shapes of an upload.

        `aggregate` averages these; all other tensors of an upload describe images.
        """
        ...


class Predictor(Protocol):
    """A composed global model."""

    @property
    def classes(self) -> tuple[int, ...]:
        """Candidate class ids, one per column of the logits."""
        ...

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, len(classes)), larger is likelier."""
        ...


class Model(Protocol):
    """Composition of a broadcast and a backbone to logits over the seen classes.

    Evaluation, prediction and export use only this. A result of `compose` can be exported if it is
    a `heads.scorer.Scorer` or a `frozen_features.FeatureScorer`: the file holds their very score.
    """

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Build the predictor; the backbone stays untouched (adapter views only)."""
        ...


def learned(method: str, result: object) -> tuple[State, Payload]:
    """Return what a learner's `run` has returned: its state and the upload.

    Args:
        method: its name.
        result: a pair of both, if the learner keeps to its type.

    Raises:
        WorkerError: it is something else.
    """
    match result:
        case (Payload() as state, Payload() as upload):
            return state, upload
        case tuple():
            got = f"({', '.join(type(part).__name__ for part in result)})"
        case _:
            got = type(result).__name__
    raise WorkerError(
        f"the learner of {method} returned {got}; run must return (State, Payload).",
        action="Correct the method's learner.",
    )
