"""The values that a method's halves are called with: task, hyper-parameters, context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fcil_adapters.contract.averaging import PLAIN, Averaging
from fcil_adapters.contract.backbone_info import BackboneInfo
from fcil_adapters.contract.exemplars import Exemplars
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.contract.privacy import OFF, Privacy
from fcil_protocol.payloads.payload import Payload

State = Payload  # named tensors + meta; one safetensors file on disk


@dataclass(frozen=True)
class TaskInfo:
    """One class increment. Class ids are global and never reused.

    Attributes:
        index: t = 0 .. T-1.
        classes: C_t, the ids of the classes that this task adds, in order.
        past: C_<t, all earlier ids, in order of their tasks.
    """

    index: int
    classes: tuple[int, ...]
    past: tuple[int, ...] = ()

    @property
    def seen(self) -> tuple[int, ...]:
        """C_<=t, in order of their tasks."""
        return self.past + self.classes


@dataclass(frozen=True)
class Progress:
    """A learner's progress, for terminals and status: 0 <= done <= total steps."""

    done: int
    total: int
    loss: float | None = None


@dataclass(frozen=True)
class TrainingMetrics:
    """Loss and accuracy of a round's training on its own images; for people, not for a state.

    Attributes:
        loss: mean of the objective over the images of the last epoch.
        accuracy: share of these images, 0 to 1, that the model in training gave their own class;
            None: the learner has no scores of classes.
    """

    loss: float
    accuracy: float | None = None


def _ignore(_: Progress | TrainingMetrics) -> None:
    return None


class Hparams(BaseModel):
    """Base of every method's hyper-parameters; field descriptions become the option list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Context:
    """Everything that a half may use besides its state and its inputs.

    Attributes:
        kind: the exchange (``prepare``, ``train``, ``finish``, ``pseudo``, ``evaluate``).
        round: index of this exchange within (task, kind), from 0; ``rounds`` is their number.
        hparams: the method's hyper-parameters, the same on all sides.
        device: torch device name for torch halves.
        seed: entropy words; `rng` and `torch_seed` derive independent streams from them.
        backbone: the loaded, immutable backbone (None for methods that need none and on the server
            where none is needed).
        micro_batch: largest number of images in one forward and backward pass; gradients are
            accumulated to the method's batch size. None: the entire batch.
        max_weight_share: cap on one client's aggregation weight ([trust]).
        averaging: the rule that averages tensors ([trust]).
        privacy: clipping and noise of a learner's statistics ([privacy]).
        forms: the form in which tensors travel ([wire] half); an aggregator commits to it what it
            broadcasts, before it enters the state.
        progress: to be called about once per step.
        trained: to be called after a training by gradient (`optimise` does); the last call stands.
        exemplars: images of past classes, for a learner whose method declares them; else None.
        min_count: images of a class below which nothing of it leaves a client. Labelled images are
            chosen by it already; a learner that gives labels itself obeys it.
        masked_run: id of the run if its rounds are masked (`fcil_adapters.masks`); else empty.
        summed: updates that are sums are added up before the method sees them, as some come added
            up by relays (`fcil_adapters.numerics.relay_sums`).
        digests: SHA-256 (N, 32) of a learner's images where they are unlabelled; else None.
    """

    kind: str
    task: TaskInfo
    round: int
    rounds: int
    hparams: Any
    backbone_info: BackboneInfo
    device: str = "cpu"
    seed: tuple[int, ...] = (0,)
    backbone: Any = None
    micro_batch: int | None = None
    max_weight_share: float = 1.0
    averaging: Averaging = PLAIN
    privacy: Privacy = OFF
    forms: Forms = EXACT
    progress: Callable[[Progress], None] = _ignore
    trained: Callable[[TrainingMetrics], None] = _ignore
    exemplars: Exemplars | None = None
    min_count: int = 1
    masked_run: str = ""
    summed: bool = False
    digests: NDArray[np.uint8] | None = None

    def rng(self, *purpose: int) -> np.random.Generator:
        """Return a generator that depends on seed, task, kind, round and purpose alone."""
        kind = int.from_bytes(self.kind.encode()[:6], "big")
        words = (*self.seed, self.task.index + 1, kind, self.round, *purpose)
        return np.random.default_rng(np.random.SeedSequence(words))

    def torch_seed(self, *purpose: int) -> int:
        """Return a seed for a torch generator, independent of those of `rng`."""
        return int(self.rng(0x7061, *purpose).integers(2**63 - 1))
