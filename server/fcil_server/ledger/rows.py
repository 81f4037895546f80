"""Rows of the ledger: one frozen dataclass per table.

Field names equal column names, so a row is built without a mapping in between
(`databases.database.build`). Times are unix seconds (``_at``), durations seconds (``_s``), sizes
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId, UpdateId
from fcil_server.ledger.enums import (
    Answer,
    Cause,
    CountSource,
    Direction,
    Outcome,
    Role,
    RunStatus,
    UpdateStatus,
)

if TYPE_CHECKING:
    from fcil_protocol.trust.keys import PublicKeys

# How columns that SQLite has no type for become fields.
_JSON = {"decode": json.loads}
_STATE = {"decode": lambda state: None if state is None or state < 0 else state}
_IDS = {"decode": lambda text: tuple(json.loads(text))}


@dataclass(frozen=True)
class ClientRow:
    """One enrolled device and its public keys.

    Attributes:
        via: the relay that it connects through; None if it connects to the server.
        address: HOST:PORT for a relay's clients; empty otherwise.
    """

    TABLE: ClassVar[str] = "clients"

    client_id: ClientId
    name: str
    curve: bytes = field(repr=False)
    signing: bytes = field(repr=False)
    sealing: bytes = field(repr=False)
    enrolled_at: float
    not_after: float | None
    revoked_at: float | None
    last_seen: float | None
    device: str
    revoked_why: str
    role: Role = field(metadata={"decode": Role})
    via: ClientId | None
    address: str

    @property
    def public_keys(self) -> PublicKeys:
        """Its keys, as others know them."""
        from fcil_protocol.trust.keys import PublicKeys  # who only counts does without cryptography

        return PublicKeys(curve=self.curve, signing=self.signing, sealing=self.sealing)

    def may_join(self, now: float) -> bool:
        """Say whether the client is neither revoked nor expired at ``now``."""
        return self.revoked_at is None and (self.not_after is None or now < self.not_after)


@dataclass(frozen=True)
class TicketRow:
    """An invitation that was handed out: the public keys of the guest who bears it.

    Attributes:
        client: who came in with it.
        via: the relay that its holder connects through.
    """

    TABLE: ClassVar[str] = "tickets"

    curve: bytes = field(repr=False)
    signing: bytes = field(repr=False)
    name: str
    issued_at: float
    expires_at: float
    used_at: float | None
    withdrawn_at: float | None
    client: ClientId | None
    role: Role = field(metadata={"decode": Role})
    via: ClientId | None

    def open_s(self, now: float) -> float:
        """Return the seconds for which it is still valid; 0: it is not."""
        if self.used_at is not None or self.withdrawn_at is not None:
            return 0.0
        return max(0.0, self.expires_at - now)


@dataclass(frozen=True)
class Erased:
    """Result of erasing a client, and traces of it that cannot be removed.

    Attributes:
        pseudonym: the client's name from now on.
        counted: how many of its updates are averaged into states.
        audited: how many lines of the audit log name it.
    """

    pseudonym: str
    evaluations: int
    events: int
    counted: int
    audited: int


@dataclass(frozen=True)
class RunRow:
    """One learning history.

    Attributes:
        config: the TOML that it started with.
        parent_run, parent_state: what it was forked from.
        inherited: how many of its first rounds are copies of its parent's.
        emptied_at: since when its states and updates are gone, for a client was forgotten.
        promoted: the state whose model clients use; None: always the newest.
    """

    TABLE: ClassVar[str] = "runs"

    run_id: RunId
    created_at: float
    method: str
    method_version: str
    config: str = field(repr=False)
    hparams: Mapping[str, Any] = field(metadata=_JSON)
    backbone: Mapping[str, Any] = field(metadata=_JSON)
    schema_digest: str
    seed: int
    status: RunStatus = field(metadata={"decode": RunStatus})
    parent_run: RunId | None
    parent_state: int | None
    environment: Mapping[str, Any] = field(metadata=_JSON)
    inherited: int = 0
    emptied_at: float | None = None
    promoted: int | None = field(default=None, metadata=_STATE)


@dataclass(frozen=True)
class ClassRow:
    """One class name of a run.

    Attributes:
        key: the form by which names are matched.
        class_id: None while the name waits for its task.
        planned_task: the task that a listed schedule put it in; None when discovered.
        task: the task it entered; None until that task opened.
        admitted: whether a task may take it; False until an operator says so (`tasks.admit`).
    """

    TABLE: ClassVar[str] = "classes"

    run: RunId
    key: str
    name: str
    class_id: int | None
    planned_task: int | None
    task: int | None
    first_seen_by: ClientId | None
    seen_at: float
    hidden: bool = field(metadata={"decode": bool})
    admitted: bool = field(metadata={"decode": bool})


@dataclass(frozen=True)
class AliasRow:
    """A further name of a class.

    Attributes:
        key: the form by which it is matched.
        target: the key of the class.
    """

    run: RunId
    key: str
    name: str
    target: str


@dataclass(frozen=True)
class TaskRow:
    """One class increment of a run."""

    TABLE: ClassVar[str] = "tasks"

    run: RunId
    task: int
    class_ids: tuple[int, ...] = field(metadata=_IDS)
    opened_at: float
    closed_at: float | None


@dataclass(frozen=True)
class RoundRow:
    """One exchange.

    Attributes:
        seq: ordinal within the run, from 0.
        remaining_s: server uptime left until the deadline; None: no deadline.
        asked: the clients sampled.
        reopened: how often it came up short and went on.
        phases: name -> seconds (``collect_s``, ``aggregate_s`` ...).
        why: what closed it (`rounds.events.Why`); empty while it is open.
    """

    TABLE: ClassVar[str] = "rounds"

    run: RunId
    task: int
    kind: str
    round: int
    seq: int
    opened_at: float
    remaining_s: float | None
    asked: tuple[ClientId, ...] = field(metadata=_IDS)
    reopened: int
    closed_at: float | None
    outcome: Outcome | None = field(metadata={"decode": lambda v: v and Outcome(v)})
    base_state: int
    new_state: int | None
    phases: Mapping[str, float] = field(metadata=_JSON)
    metrics: Mapping[str, Any] = field(metadata=_JSON)
    why: str

    @property
    def key(self) -> RoundKey:
        """The key of this round."""
        return RoundKey(self.run, self.task, self.kind, self.round)


@dataclass(frozen=True)
class UpdateRow:
    """One accepted update.

    Attributes:
        reason: why it was excluded.
        train_loss, train_accuracy: of its training, as the client says; None: it does not.
        base_state: the state that it starts from; None: the one that its round starts from.
        sum_id: the sum that came in its place, from a relay; None: it came itself.
    """

    TABLE: ClassVar[str] = "updates"

    run: RunId
    client: ClientId
    task: int
    kind: str
    round: int
    update_id: UpdateId
    accepted_at: float
    samples: int
    tensor_bytes: int
    sealed_bytes: int
    status: UpdateStatus = field(metadata={"decode": UpdateStatus})
    reason: str
    train_loss: float | None
    train_accuracy: float | None
    base_state: int | None = None
    sum_id: UpdateId | None = None

    @property
    def record(self) -> UpdateId:
        """The key under which the spool has it."""
        return self.sum_id or self.update_id


@dataclass(frozen=True)
class UpdateFate:
    """Columns of an `UpdateRow`: whose it is, how it was trained, and what became of it."""

    TABLE: ClassVar[str] = "updates"

    client: ClientId
    status: UpdateStatus = field(metadata={"decode": UpdateStatus})
    reason: str
    samples: int
    train_loss: float | None
    train_accuracy: float | None
    base_state: int | None = None


@dataclass(frozen=True)
class AnswerRow:
    """Why an asked client gave no update to a round."""

    TABLE: ClassVar[str] = "answers"

    run: RunId
    task: int
    kind: str
    round: int
    client: ClientId
    answer: Answer = field(metadata={"decode": Answer})
    reason: str
    at: float


@dataclass(frozen=True)
class ByteCount:
    """Bytes of one flow, growing.

    ``tensor`` <= ``sealed`` <= ``application`` <= ``wire`` for predicted payload flows: the
    tensors alone; the envelope; all message frames; TCP payload with ZMTP and CURVE. A
    kernel count is of the whole connection and never added to a predicted one: ``wire`` is
    TCP payload, each byte once, ``retransmitted`` what was sent down again, ``link`` the
    frames on an Ethernet link. A reported count is what a client says it has fetched from an object
    store: ``wire`` is the sealed bytes, without what HTTP adds.
    """

    TABLE: ClassVar[str] = "bytes"

    run: RunId | None
    task: int | None
    kind: str | None
    round: int | None
    client: ClientId | None
    direction: Direction = field(metadata={"decode": Direction})
    cause: Cause = field(metadata={"decode": Cause})
    source: CountSource = field(metadata={"decode": CountSource})
    tensor: int
    sealed: int
    application: int
    wire: int
    retransmitted: int = 0
    link: int = 0


@dataclass(frozen=True)
class Evaluation:
    """One evaluator's correct test images of a class after task ``task``."""

    run: RunId
    task: int
    client: str
    class_id: int
    correct: int
    total: int


@dataclass(frozen=True)
class StateRow:
    """One committed state: its number, content digest, and the round that made it."""

    run: RunId
    state: int
    digest: Digest
    parent: Digest | None
    task: int
    kind: str
    round: int
    created_at: float

    @property
    def key(self) -> RoundKey:
        """The round that made it."""
        return RoundKey(self.run, self.task, self.kind, self.round)


@dataclass(frozen=True)
class PartRow:
    """One sealed part of a broadcast.

    Attributes:
        plain_digest: SHA-256 of the payload's bytes; an unchanged part is found by it.
        digest: SHA-256 of the sealed part's header; clients ask by it.
        wrapped: the content key, wrapped to the server.
    """

    run: RunId
    name: str
    plain_digest: Digest
    digest: Digest
    file: str
    plain_bytes: int
    sealed_bytes: int
    wrapped: bytes = field(repr=False)
    created_at: float


@dataclass(frozen=True)
class Event:
    """Something that happened and that an operator may want to read."""

    id: int
    at: float
    level: str
    run: RunId | None
    client: ClientId | None
    code: str
    text: str


@dataclass(frozen=True)
class RefusalRow:
    """One message that was refused; ``client`` is None for strangers."""

    id: int
    at: float
    client: ClientId | None
    code: str
    reason: str


class NewEvent(NamedTuple):
    """An `Event` to be written, in the order of its columns."""

    at: float
    level: str
    run: RunId | None
    client: ClientId | None
    code: str
    text: str


class NewRefusal(NamedTuple):
    """A `RefusalRow` to be written, in the order of its columns."""

    at: float
    client: ClientId | None
    code: str
    reason: str


@dataclass(frozen=True)
class AuditEntry:
    """One operator action; the table refuses changes."""

    id: int
    at: float
    actor: str
    action: str
    detail: str
