"""Fixed context and current progress of a run, shared by the parts of the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fcil_adapters.contract import (
    BackboneInfo,
    Context,
    Exchange,
    Hparams,
    Method,
    Part,
    State,
    TaskInfo,
)
from fcil_adapters.contract.averaging import Averaging
from fcil_adapters.masks.exchanges import MASKING, fewest_classes
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId
from fcil_protocol.messages.messages import Message, PartRef
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.kept_updates import KeptUpdates
from fcil_server.aggregation.publisher import Publisher, Stamp
from fcil_server.aggregation.store import StateStore
from fcil_server.event_loop import Lag
from fcil_server.federation.config import Config
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.events import Phase
from fcil_server.rounds.machine import Round
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.peers import Peer, Peers


@dataclass(frozen=True)
class RunContext:
    """Everything that stays the same while a run is served.

    Attributes:
        send: sends a message to a client's session; False if it is gone.
        notify: writes a note for the operator: (level, code, text).
        lag: returns how late the loop was since the last call.
        kept: store of counted updates; None: they are removed with the state after next.
        forgotten: clients, each with a task for which it is no longer asked.
        attended: an operator may resume a paused run; False with ``--until-done``.
    """

    run: RunId
    config: Config
    method: Method
    hparams: Hparams
    info: BackboneInfo
    schema_digest: str
    ledger: Ledger
    classes: ClassRegistry
    states: StateStore
    spool: Spool
    publisher: Publisher
    aggregation: Aggregation
    peers: Peers
    send: Callable[[Peer, Message], bool]
    notify: Callable[[str, str, str], None]
    lag: Callable[[], Lag] = Lag
    kept: KeptUpdates | None = None
    forgotten: frozenset[tuple[ClientId, int]] = frozenset()
    attended: bool = True

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the run's method."""
        return self.method.exchanges(self.hparams, self.info)

    @cached_property
    def counts_late(self) -> bool:
        """True if images of learned classes are counted when they come."""
        return any(e.late for e in self.exchanges)

    @cached_property
    def masked_kinds(self) -> frozenset[str]:
        """The kinds of the method's own rounds, if they are masked."""
        own = () if self.method.plain is None else self.exchanges
        return frozenset(e.kind for e in own if e.masking and e.kind not in MASKING)

    @cached_property
    def fewest_classes(self) -> int:
        """Fewest classes of a task: masked training has none of one (`masks.exchanges`)."""
        return fewest_classes(self.method, self.exchanges)

    def is_asynchronous(self, kind: str) -> bool:
        """Return True if updates of rounds of a kind may start from older states of the task."""
        exchange = self.exchange(kind)
        return self.config.round.mode == "async" and exchange is not None and exchange.averaged

    def continues_after(self, step: Step) -> bool:
        """Return True if an update that comes as a round closes can count in a later one."""
        return self.is_asynchronous(step.kind) and not step.is_last

    def exchange(self, kind: str) -> Exchange | None:
        """Return the method's exchange of one kind; None: the kind is the protocol's own."""
        return next((e for e in self.exchanges if e.kind == kind), None)

    def name_of(self, client: str) -> str:
        """Return a client's name, as the operator reads it."""
        row = self.ledger.clients.get(ClientId(client))
        return row.name if row else client[:8]


class Mode(StrEnum):
    """The operator's choice: rounds continue, pause, or end."""

    RUNNING = "running"
    PAUSED = "paused"  # no round opens
    DRAINING = "draining"  # no round opens, and then the server stops


@dataclass
class RunProgress:
    """Progress of a run; only its coordinator writes it.

    Attributes:
        state, number, digest: the committed state that the next round starts from.
        parts, refs: its broadcast, once computed, and the sealed references to it.
        names: the part of a masked round that is of the run and not of the state.
        about: `fcil_adapters.masks.record.context_of` a round of masked sums; empty: it is another.
        mode: the operator's choice; lasts until the server ends.
        held_for: why the run is paused, if the operator did not pause it.
        oldest_base: oldest state that an update of the round under way may start from; -1: `base`
            alone.
        opened_at: when the round under way first asked a client, unix seconds.
        unheld_since: since when too few connected clients have data for the task, while its rounds
            are skipped for that reason.
    """

    task: TaskInfo | None = None
    step: Step | None = None
    round: Round | None = None
    state: State = field(default_factory=State)
    number: int = -1
    digest: Digest | None = None
    parts: tuple[Part, ...] = ()
    names: tuple[Part, ...] = ()
    about: bytes = b""
    refs: list[PartRef] = field(default_factory=list)
    mode: Mode = Mode.RUNNING
    held_for: str = ""
    unheld_since: float | None = None
    opened_at: float | None = None
    oldest_base: int = -1
    _phase: Callable[[], str] = field(init=False, repr=False)
    _waiting_for: Callable[[], str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Say what a status reads until the run first shows a phase."""
        self.show("starting")

    @property
    def phase(self) -> str:
        """One word for status."""
        return self._phase()

    @property
    def waiting_for(self) -> str:
        """The phrase that names what the run waits for; empty while busy."""
        return self._waiting_for()

    @property
    def base(self) -> int:
        """State number that updates of the open round must name."""
        return max(self.number, 0)

    @property
    def is_open(self) -> bool:
        """True if a round takes updates."""
        return self.round is not None and self.round.phase is Phase.OPEN

    def key(self, run: RunId) -> RoundKey | None:
        """Return the round under way."""
        if self.task is None or self.step is None:
            return None
        return RoundKey(run, self.task.index, self.step.kind, self.step.round)

    def show(self, phase: str, waiting_for: str = "") -> None:
        """Set the phase and the phrase that names what the run waits for."""
        self.show_live(lambda: phase, lambda: waiting_for)

    def show_live(self, phase: Callable[[], str], waiting_for: Callable[[], str]) -> None:
        """Let functions return both when they are read: the phrase takes a look at every client."""
        self._phase, self._waiting_for = phase, waiting_for

    def hold(self, why: str) -> None:
        """Pause the run, unless the operator wants something else already."""
        if self.mode is Mode.RUNNING:
            self.mode, self.held_for = Mode.PAUSED, why

    def adopt(
        self, state: State, number: int, digest: Digest, parts: tuple[Part, ...] = ()
    ) -> None:
        """Continue from a newly committed state, and from its broadcast if that is known."""
        self.state, self.number, self.digest = state, number, digest
        self.parts = parts


def averaging_of(config: Config) -> Averaging:
    """Return the rule that averages the clients' tensors."""
    trust = config.trust
    return Averaging(trust.averaging, trust.trim, trust.clip)


def method_context(context: RunContext, task: TaskInfo, step: Step) -> Context:
    """Return the context that the method's server halves get."""
    return Context(
        kind=step.kind,
        task=task,
        round=step.round,
        rounds=step.rounds,
        hparams=context.hparams,
        backbone_info=context.info,
        device=context.aggregation.device,
        seed=(context.config.run.seed,),
        max_weight_share=context.config.trust.max_weight_share,
        averaging=averaging_of(context.config),
        forms=context.method.forms,
        masked_run="" if context.method.plain is None else context.run,
        summed=context.config.privacy.relay_sums,
    )


def header_stamp(context: RunContext, base: int, task: TaskInfo, step: Step) -> Stamp:
    """Return the header fields of parts of a state that are sealed now; ``base`` is its number."""
    return Stamp(
        method=context.method.name,
        schema_digest=context.schema_digest,
        task=task.index,
        round=step.round,
        kind=step.kind,
        base=base,
    )
