"""The manifest of a method: its exchanges, schemas, options and limits (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fcil_adapters.contract.averaging import Additive, AveragingRule, capped, mean_only
from fcil_adapters.contract.backbone_info import BackboneInfo
from fcil_adapters.contract.context import Hparams, TaskInfo
from fcil_adapters.contract.exemplars import no_exemplars
from fcil_adapters.contract.forgetting import cannot_forget_reason
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.contract.privacy import Statistic, no_statistics
from fcil_adapters.contract.traffic import Cadence, Claim, Economy, Largest
from fcil_protocol.payloads.builtin import LATE
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema

EXCHANGE_KINDS = ("prepare", "train", "finish", "pseudo", LATE)  # that a manifest may have


def _no_faults(_payload: Payload, _task: TaskInfo) -> list[str]:
    return []


@dataclass(frozen=True)
class Exchange:
    """One kind of round of a method.

    Attributes:
        kind: one of `EXCHANGE_KINDS`.
        upload: schema of a client's upload. It must hold ``n``, int64 (1,): the samples used.
        rounds: number per task; None: ``[round] rounds_per_task``.
        check: further consistency rules, one sentence per fault.
        keeps_state: True if the learner's new state is kept once the update is counted.
        first_task: only the first task has these rounds.
        trains: for a `Method.frozen` method: its clients train on what the server broadcast, which
            needs torch. A client without it declines, and one with a counted update cannot be
            forgotten exactly.
        unlabelled: number of unlabelled images that a client looks at, drawn at random; 0: it gets
            the task's. They have the label -1, and none that its state names as counted is among
            them (`contract.local_images`). The rounds follow the task's evaluation, which is made
            again after them, and take place if it has found at least ``least_accuracy`` of the test
            images classified rightly.
        gives_up: number of rounds; if the clients of the task's first ones answer, or have time to,
            and none sends an update, no client is asked for the others. 0: never.
        counts_once: an image is in one counted update of a run at most. The learner gets the images
            that the client's state does not name as counted (`contract.local_images`), of classes
            with at least ``least_images`` of these; after it, the worker names those of the classes
            that the upload describes (`forgetting`).
        averaged: the aggregator averages tensors that clients trained from its
            `AveragingAggregator.start`, so an update may start from an older state of the task
            (``[round] mode = "async"``).
        additive: its uploads as sums, which a server can add up without seeing one of them
            (``[privacy] secure`` and ``relay_sums``); None: it needs each client's own.
        masking: it is part of a masked round (`fcil_adapters.masks`).
    """

    kind: str
    upload: PayloadSchema
    rounds: int | None = None
    check: Callable[[Payload, TaskInfo], list[str]] = _no_faults
    keeps_state: bool = False
    first_task: bool = False
    trains: bool = False
    gives_up: int = 0
    unlabelled: int = 0
    least_accuracy: float = 0.0
    counts_once: bool = False
    least_images: int = 1
    averaged: bool = False
    additive: Additive | None = None
    masking: bool = False

    def __post_init__(self) -> None:
        if (self.unlabelled or self.counts_once) and not self.keeps_state:
            raise ValueError("an exchange that counts images keeps the state that names them")
        if self.late and not self.counts_once:
            raise ValueError("a late exchange counts an image once")
        if self.averaged and self.keeps_state:
            raise ValueError("an averaged exchange cannot keep a client's state")

    @property
    def late(self) -> bool:
        """True if its rounds are no part of a task: they collect late images of all classes."""
        return self.kind == LATE

    @property
    def summable(self) -> bool:
        """True if relays may add up its uploads (``[privacy] relay_sums``)."""
        return self.additive is not None and not self.late

    def in_task(self, index: int) -> bool:
        """Return True if a task has these rounds."""
        return index == 0 or not self.first_task


def _as_schemas(_h: Any, _b: BackboneInfo, _t: TaskInfo, _clients: int) -> Largest:
    return Largest()


def cannot_start(_h: Any) -> str:
    """Return why a run of a method, unless it declares otherwise, begins with no adapter."""
    return "it trains no LoRA that all tasks share"


def can_start(_h: Any) -> str:
    """Return an empty text: the LoRA drawn for the first task is the one of all tasks."""
    return ""


@dataclass(frozen=True)
class Method:
    """The torch-free manifest of a method, found through the entry-point group ``fcil.methods``.

    Attributes:
        exchanges: (hparams, backbone) -> exchanges in the order in which a task runs them.
        broadcast: (hparams, backbone) -> schema per part kind.
        dims: (hparams, backbone, task) -> values of the schemas' known symbols.
        learner, aggregator, model: ``package.module:Class``.
        changes: ``package.module:function`` that reads a broadcast's LoRA as changes of weights,
            (ctx, broadcast) -> `toolkit.lora.low_rank.Changes`, for the export of an adapter; empty
            for methods without LoRA.
        starts: hparams -> why the LoRA of a run cannot begin as that of an adapter; empty: it can,
            and its state after the first opening has it as ``lora.<place>.<A|B>``.
        presets: name -> overrides of the defaults.
        cadence: part kind -> when it changes; ``ROUND`` for kinds without an entry.
        largest: (hparams, backbone, task, clients) -> largest traffic where schemas allow more.
        averagings: hparams -> the rules of `Averaging` that it can work with; those beyond the mean
            take effect where it calls `averaging.average`.
        uncapped: hparams -> why no weight is capped at ``ctx.max_weight_share`` and what would cap
            it, for the operator who set one; empty: weights are capped.
        forgets: hparams -> why no client can be forgotten exactly; empty: one can (`forgetting`),
            unless it has trained (`Exchange.trains`).
        statistics: (hparams, kind of exchange, task) -> the learner's noised sums when
            ``ctx.privacy`` is on; other tensors, apart from counts, are unprotected. May raise
            ConfigError for options that exclude noise.
        needs_backbone: False for methods that work on pixels or numbers alone.
        frozen: learner and model use the backbone through `frozen_features.Extractor` alone, and
            import no torch, but for exchanges with `Exchange.trains`: any engine will do for a
            client.
        half: the kinds of tensors that its aggregator commits (`Forms.commit`), which may therefore
            travel in half precision.
        forms: the forms of its tensors in a run; `registry.with_forms` sets them.
        claim: its paper's statement of the bytes sent; None where the paper has none.
        economies: its ways to send less, the least costly in accuracy first.
        plain: the method whose rounds this one masks (`masks.exchanges.with_masks`); else None.
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
    changes: str = ""
    starts: Callable[[Any], str] = cannot_start
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    needs_backbone: bool = True
    frozen: bool = False
    cadence: Mapping[str, Cadence] = field(default_factory=lambda: MappingProxyType({}))
    largest: Callable[[Any, BackboneInfo, TaskInfo, int], Largest] = _as_schemas
    averagings: Callable[[Any], tuple[AveragingRule, ...]] = mean_only
    uncapped: Callable[[Any], str] = capped
    forgets: Callable[[Any], str] = cannot_forget_reason
    statistics: Callable[[Any, str, TaskInfo], tuple[Statistic, ...]] = no_statistics
    half: tuple[Kind, ...] = ()
    forms: Forms = EXACT
    claim: Claim | None = None
    economies: tuple[Economy, ...] = ()
    plain: Method | None = None
    exemplars: Callable[[Any], int] = no_exemplars

    def reports_training(self, exchange: Exchange) -> bool:
        """Return True if uploads of an exchange may hold the loss and accuracy of a training."""
        if exchange.masking:  # what is of one client alone
            return False
        return exchange.trains or (self.needs_backbone and not self.frozen)
