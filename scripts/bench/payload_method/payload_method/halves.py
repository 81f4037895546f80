"""Random tensors up, their averages down."""

# ruff: noqa: ARG002  the contract names the arguments
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, ImageSet, Part, Predictor, State, Updates
from fcil_protocol.payloads.payload import Payload


class Learner:
    """Draws other numbers in every round."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Return the tensors and n."""
        rng = np.random.default_rng((*ctx.seed, ctx.round))
        options = ctx.hparams
        drawn = {
            f"w{i}": rng.random(options.each, dtype=np.float32) for i in range(options.tensors)
        }
        return state, Payload({**drawn, "n": np.array([max(1, len(data))], dtype=np.int64)})


class Aggregator:
    """The state is the average of the last round's tensors."""

    def init(self, ctx: Context) -> State:
        """Return zeros."""
        options = ctx.hparams
        return State(
            {f"w{i}": np.zeros(options.each, dtype=np.float32) for i in range(options.tensors)}, {}
        )

    def open_task(self, ctx: Context, state: State) -> State:
        """Change nothing."""
        return state

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average one update after the other."""
        sums = {name: np.zeros_like(t) for name, t in state.tensors.items()}
        count = 0
        for update in updates:
            count += 1
            for name in sums:
                sums[name] += update.payload.f32(name)
        return State({name: total / np.float32(count) for name, total in sums.items()}, {})

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the averages."""
        return (Part("weights", State(state.tensors)),)


class Guess:
    """Says the first class to every picture."""

    def __init__(self, classes: tuple[int, ...]) -> None:
        self.classes = classes

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the same for all."""
        scores = np.zeros((len(images), len(self.classes)), dtype=np.float32)
        scores[:, :1] = 1
        return scores


class Model:
    """Needs nothing of what was learned, since nothing was."""

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Return a guess."""
        return Guess(tuple(ctx.task.seen))
