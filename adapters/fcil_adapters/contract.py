"""The contract of a method: manifest, learner, aggregator, model.

A method is one folder with a manifest (`Method`, no torch) and three halves that workers
load by name. State goes in and comes out; nothing hides on ``self`` between rounds.

The smallest method, whole (counts samples, needs no backbone)::

    class Learner:
        def run(self, ctx, state, broadcast, data):
            n = np.array([len(data)], np.int64)
            return state, Payload({"n": n})

    class Aggregator:
        def init(self, ctx):
            return State({"total": np.zeros(1, np.int64)})
        def open_task(self, ctx, state):
            return state
        def aggregate(self, ctx, state, updates):
            total = state.i64("total") + sum(u.payload.i64("n") for u in updates)
            return State({"total": total})
        def broadcast(self, ctx, state):
            return (Part("current", state),)

The way of one round: the server's worker calls ``broadcast(state)``; each asked client
fetches the parts it lacks, its worker calls ``Learner.run``; the payload is checked against
the exchange's upload schema on both sides; the server's worker calls ``aggregate`` with the
accepted updates in ClientId order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fcil_adapters.averaging_rules import PLAIN, Averaging, AveragingRule, capped, mean_only
from fcil_adapters.cadence import Cadence, Largest
from fcil_adapters.claims import Claim
from fcil_adapters.economies import Economy
from fcil_adapters.exemplars import Exemplars, none_kept
from fcil_adapters.forgetting import entangled
from fcil_adapters.forms import EXACT, Forms
from fcil_adapters.privacy import OFF, Privacy, Statistic, no_statistics
from fcil_protocol.ids import ClientId
from fcil_protocol.payload import Payload
from fcil_protocol.schema import Kind, PayloadSchema

State = Payload  # named tensors + meta; one safetensors file on disk


@dataclass(frozen=True)
class Preprocessing:
    """From a decoded picture to the backbone's input, the same on every device.

    The picture becomes RGB, its shorter side ``round(size / crop_pct)`` pixels, then the
    central ``size`` x ``size`` square, uint8; the backbone normalises with mean and std
    (of values in [0, 1]).
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0


@dataclass(frozen=True)
class BackboneInfo:
    """What one may know of the frozen backbone without torch.

    Attributes:
        digest: SHA-256 over sorted (name, shape, fp32 little-endian bytes) of the headless
            state dict, before casting or merging (hex).
    """

    name: str
    dim: int  # d, width of the CLS feature
    depth: int  # number of blocks
    heads: int
    mlp_dim: int
    preprocessing: Preprocessing
    digest: str


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
    """How far a learner is, for terminals and status: 0 <= done <= total steps."""

    done: int
    total: int
    loss: float | None = None


def _ignore(_: Progress) -> None:
    return None


class Hparams(BaseModel):
    """Base of every method's hyper-parameters; field descriptions become the option list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Context:
    """Everything a half may use besides its state and its inputs.

    Attributes:
        kind: the exchange (``prepare``, ``train``, ``finish``, ``evaluate``).
        round: index of this exchange within (task, kind), from 0; ``rounds`` is how many.
        hparams: the method's hyper-parameters, the same on all sides.
        device: torch device name for torch halves.
        seed: entropy words; `rng` and `torch_seed` derive independent streams from them.
        backbone: the loaded, immutable backbone (None for methods that need none and on
            the server where none is needed).
        micro_batch: largest number of images in one forward and backward pass; gradients
            are accumulated to the method's batch size. None: the whole batch.
        max_weight_share: cap on one client's aggregation weight ([trust]).
        averaging: how tensors are averaged ([trust]).
        privacy: how a learner clips and noises its statistics ([privacy]).
        forms: in which form tensors travel ([wire] half); an aggregator commits to it what it
            broadcasts, before it enters the state.
        progress: to be called about once per step.
        exemplars: images of past classes, for a learner whose method declares them; else None.
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
    exemplars: Exemplars | None = None

    def rng(self, *purpose: int) -> np.random.Generator:
        """Return a generator that depends on seed, task, kind, round and purpose alone."""
        kind = int.from_bytes(self.kind.encode()[:6], "big")
        words = (*self.seed, self.task.index + 1, kind, self.round, *purpose)
        return np.random.default_rng(np.random.SeedSequence(words))

    def torch_seed(self, *purpose: int) -> int:
        """Return a seed for a torch generator, independent of those of `rng`."""
        return int(self.rng(0x7061, *purpose).integers(2**63 - 1))


class ImageSet(Protocol):
    """The learner's or evaluator's door to local images of some classes, decoded once."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Global class ids, (N,)."""
        ...

    @property
    def size(self) -> int:
        """Side of the square images in pixels, S."""
        ...

    def __len__(self) -> int:
        """Number of images, N."""
        ...

    def take(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return images as uint8 (len(index), S, S, 3), RGB, preprocessed, not augmented."""
        ...


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
        """Which broadcast schema it has."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Update:
    """One client's accepted contribution to a round."""

    client: ClientId
    payload: Payload


class Updates(Protocol):
    """The accepted updates of a round in ClientId order, opened one at a time.

    ``samples`` is known before any update is opened, so weighted sums can stream; it may be
    iterated more than once. Tensors are read-only views of the update: who keeps one beyond its
    update's turn copies it, or the whole update stays in memory.
    """

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Who contributed, sorted."""
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
            state: what this client kept from its last counted update (empty at first).
            broadcast: part name -> payload, all parts of the state that the round starts from.
            data: the train images of the current task's classes, nothing else.

        Returns:
            The new state, provisional until a broadcast names the update as counted, and
            the payload for the exchange's upload schema.
        """
        ...


class Aggregator(Protocol):
    """The server's half."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        ...

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw everything random that task ``ctx.task`` starts with.

        Clients draw no first values (docs/methods/README.md, "First values").
        """
        ...

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Combine at least one update (float64 inside, float32 out); do not touch ``state``."""
        ...

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return all parts that a client needs at this state, however late it comes.

        A function of the state alone: unchanged parts must come out with unchanged bytes.
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
    """How a broadcast and a backbone become logits over the seen classes.

    Evaluation, prediction and export use only this. Exported can be what `compose` returns as a
    `scoring.Scorer` or a `frozen_features.FeatureScorer`: the file holds their very score.
    """

    def compose(self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Any) -> Predictor:
        """Build the predictor; the backbone stays untouched (adapter views only)."""
        ...


def _no_faults(_payload: Payload, _task: TaskInfo) -> list[str]:
    return []


@dataclass(frozen=True)
class Exchange:
    """One kind of round of a method.

    Attributes:
        kind: ``prepare``, ``train`` or ``finish``.
        upload: what a client may send. It must hold ``n``, int64 (1,): the samples used.
        rounds: how many per task; None: ``[round] rounds_per_task``.
        check: further consistency rules, one sentence per fault.
        keeps_state: whether the learner's new state is kept once the update is counted.
    """

    kind: str
    upload: PayloadSchema
    rounds: int | None = None
    check: Callable[[Payload, TaskInfo], list[str]] = _no_faults
    keeps_state: bool = False


def _as_schemas(_h: Any, _b: BackboneInfo, _t: TaskInfo, _clients: int) -> Largest:
    return Largest()


@dataclass(frozen=True)
class Method:
    """The torch-free manifest of a method, found through the entry-point group ``fcil.methods``.

    Attributes:
        exchanges: (hparams, backbone) -> exchanges in the order in which a task runs them.
        broadcast: (hparams, backbone) -> schema per part kind.
        dims: (hparams, backbone, task) -> values of the schemas' known symbols.
        learner, aggregator, model: ``package.module:Class``.
        presets: name -> overrides of the defaults.
        cadence: part kind -> when it changes; ``ROUND`` for kinds that are not named.
        largest: (hparams, backbone, task, clients) -> what travels where schemas allow more.
        averagings: hparams -> the rules of `Averaging` that it can work with; those beyond the
            mean take effect where it calls `averaging.average`.
        uncapped: hparams -> why no weight is capped at ``ctx.max_weight_share`` and what would
            cap it, for the operator who set one; empty: weights are capped.
        forgets: hparams -> why no client can be forgotten exactly; empty: one can (`forgetting`).
        statistics: (hparams, kind of exchange, task) -> what the learner makes of noised sums when
            ``ctx.privacy`` is on; other tensors, apart from counts, it does not protect. May raise
            ConfigError for options that do not go with noise.
        needs_backbone: False for methods that work on pixels or numbers alone.
        frozen: learner and model see of the backbone what `frozen_features.Extractor` says and
            nothing else, and import no torch: any engine will do for a client.
        half: the kinds of tensors that its aggregator commits (`Forms.commit`), which may
            therefore travel in half precision.
        forms: in which form its tensors travel; `registry.in_forms` sets it for a run.
        claim: what its paper says it sends; None where it says nothing of it.
        economies: how it can send less, the least costly in accuracy first.
        exemplars: hparams -> most images of past classes that a client may look at again
            (`exemplars`); 0: none, and its learners never meet one.
    """

    name: str
    version: str
    title: str
    citation: str
    hparams: type[Hparams]
    exchanges: Callable[[Any, BackboneInfo], tuple[Exchange, ...]]
    broadcast: Callable[[Any, BackboneInfo], Mapping[str, PayloadSchema]]
    dims: Callable[[Any, BackboneInfo, TaskInfo], dict[str, int]]
    learner: str
    aggregator: str
    model: str
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    needs_backbone: bool = True
    frozen: bool = False
    cadence: Mapping[str, Cadence] = field(default_factory=lambda: MappingProxyType({}))
    largest: Callable[[Any, BackboneInfo, TaskInfo, int], Largest] = _as_schemas
    averagings: Callable[[Any], tuple[AveragingRule, ...]] = mean_only
    uncapped: Callable[[Any], str] = capped
    forgets: Callable[[Any], str] = entangled
    statistics: Callable[[Any, str, TaskInfo], tuple[Statistic, ...]] = no_statistics
    half: tuple[Kind, ...] = ()
    forms: Forms = EXACT
    claim: Claim | None = None
    economies: tuple[Economy, ...] = ()
    exemplars: Callable[[Any], int] = none_kept
