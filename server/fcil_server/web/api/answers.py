"""Models of the API's answers about the federation: status, members, runs, events, methods.

Each has the fields of the command with ``--json``; fields that a model does not name pass, too.
Moments are text in ISO 8601.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Fields = dict[str, Any]


class AnswerModel(BaseModel):
    """Base of all answers: further fields pass, since a newer server may have them."""

    model_config = ConfigDict(extra="allow")


class ListenerAnswer(AnswerModel):
    """A process that serves HTTP."""

    address: str
    pid: int | None = Field(description="None while it is restarted")
    read_only: bool | None = None


class FederationAnswer(AnswerModel):
    """The federation and its server."""

    id: str = Field(description="digest of the federation's root key")
    name: str
    directory: str
    addresses: list[str] = Field(description="given to clients")
    port: int
    metrics: ListenerAnswer | None
    page: ListenerAnswer | None
    api: ListenerAnswer | None
    up_s: float = Field(description="seconds since the server's start")


class ParentAnswer(AnswerModel):
    """The state that a run was forked from."""

    run: str
    state: int


class TrainingAnswer(AnswerModel):
    """The training of the newest round whose clients report it."""

    task: int
    kind: str
    round: int
    loss: float | None
    accuracy: float | None = Field(description="share of the training images, 0 to 1")


class BestStateAnswer(AnswerModel):
    """The best tested state: `export --state best`."""

    state: int
    task: int
    correct: int
    total: int
    central: bool = Field(description="tested on the server's own folder")
    accuracy: float = Field(description="over all classes seen, percent")
    tested_by: str = Field(description="server or clients")


class StatusRunAnswer(AnswerModel):
    """The run that is served."""

    id: str
    status: str
    parent: ParentAnswer | None
    method: str
    backbone: str
    directory: str
    state: int = Field(description="number of the newest state")
    promoted: int | None = Field(description="the state whose model clients use; None: the newest")
    best: BestStateAnswer | None
    privacy: Fields
    budget: Fields | None
    training: TrainingAnswer | None


class NowAnswer(AnswerModel):
    """The run's progress."""

    phase: str
    mode: str = Field(description="running, paused or draining")
    waiting_for: str = Field(description="one phrase; empty while busy")
    task: int | None
    kind: str | None
    round: int | None
    rounds: int | None
    remaining_s: float | None = Field(description="until the deadline of the round under way")
    answers: dict[str, str] = Field(description="of the asked clients, by id")


class StatusClientAnswer(AnswerModel):
    """A member, as the running server sees it."""

    id: str
    name: str
    state: str
    why: str
    role: str
    via: str | None = Field(description="name of its relay")
    device: str
    agreement: float | None
    last_seen: Moment | None
    images: int | None
    classes: int | None
    progress: list[str | int] | None = Field(description="step, done, of")
    paused: bool
    learned_before: list[str]
    missed_tasks: list[int]


class StatusClassAnswer(AnswerModel):
    """A class name of the run."""

    id: int | None
    name: str
    task: int | None
    waiting: bool
    admitted: bool


class NoteAnswer(AnswerModel):
    """A note of the server since its start."""

    at: Moment
    level: str = Field(description="info, warning or error")
    code: str
    text: str


class QueuedRunAnswer(AnswerModel):
    """A run that waits, or that could not begin."""

    number: int
    title: str
    method: str | None = Field(description="None: the federation's")
    submitted_at: Moment | None
    by: str
    refused: str | None = Field(description="why it could not begin")


class QueueAnswer(AnswerModel):
    """The queue, in the order in which runs begin: `fcil-server run queue --json`."""

    queue: list[QueuedRunAnswer]


class StatusAnswer(AnswerModel):
    """The federation's current state: `fcil-server status --json`."""

    running: bool
    federation: FederationAnswer
    run: StatusRunAnswer
    now: NowAnswer
    clients: list[StatusClientAnswer]
    classes: list[StatusClassAnswer]
    queue: list[QueuedRunAnswer]
    refused: int = Field(description="messages refused since the server's start")
    loop: dict[str, float] = Field(description="lateness of the event loop, seconds")
    notes: list[NoteAnswer]


class RefusalAnswer(AnswerModel):
    """A refused message of a client."""

    at: Moment
    code: str
    reason: str


class MemberAnswer(AnswerModel):
    """A client that was ever enrolled."""

    id: str
    name: str
    state: str
    enrolled_at: Moment
    not_after: Moment | None
    revoked_at: Moment | None
    revoked_why: str
    last_seen: Moment | None
    device: str
    role: str = Field(description="client or relay")
    via: str | None = Field(description="name of its relay")
    rounds: int = Field(description="in which its update counted")
    wire_up: int
    wire_down: int
    refusals: list[RefusalAnswer] = Field(description="the newest three")


class OpenTicketAnswer(AnswerModel):
    """A ticket that is still good, without its secret."""

    name: str
    issued_at: Moment
    expires_at: Moment


class MembersAnswer(AnswerModel):
    """Members and open tickets: `fcil-server clients --json`."""

    clients: list[MemberAnswer]
    tickets: list[OpenTicketAnswer]


class RunListRowAnswer(AnswerModel):
    """One run of the federation."""

    id: str
    status: str
    method: str
    tasks: int
    rounds: int
    created_at: Moment
    parent: ParentAnswer | None
    emptied_at: Moment | None = Field(description="since when its states are gone")
    title: str | None = Field(description="of a submitted run")


class RunListAnswer(AnswerModel):
    """The runs, the oldest first: `fcil-server run ls --json`."""

    runs: list[RunListRowAnswer]


class EventAnswer(AnswerModel):
    """A note in the ledger."""

    id: int
    at: Moment
    level: str = Field(description="info, warning or error")
    run: str | None
    client: str | None
    code: str
    text: str


class EventsAnswer(AnswerModel):
    """A page of events, the oldest first."""

    events: list[EventAnswer]
    next: int = Field(description="`after` for the next page; the same at the end")


class MethodAnswer(AnswerModel):
    """An installed method: `fcil-server methods NAME --json`."""

    name: str
    version: str
    title: str
    citation: str
    presets: dict[str, Fields]
    masks: bool  # its rounds can be masked ([privacy] secure)
    options: dict[str, Fields]
    setting: Fields
    traffic: Fields
    budget: Fields | None


class MethodsAnswer(AnswerModel):
    """The installed methods: `fcil-server methods --json`."""

    methods: list[MethodAnswer]


class ErrorAnswer(AnswerModel):
    """The meaning of an error's code."""

    code: str
    meaning: str
    action: str
    exit_code: int = Field(description="of a command that ends with it")
    page: str = Field(description="its place in the documents")


class ErrorsAnswer(AnswerModel):
    """All codes of errors."""

    errors: list[ErrorAnswer]


class OwnTokenAnswer(AnswerModel):
    """The token of the request."""

    name: str
    role: str
    made_at: Moment
    expires_at: Moment | None
    valid: bool


class TicketAnswer(AnswerModel):
    """A new ticket; this is the only time that it is shown."""

    name: str
    ticket: str = Field(description="holds a secret: hand it over as you would a key")
    expires: Moment
    addresses: list[str] = Field(description="of the server, in the ticket")
    fingerprint: str = Field(description="of the server's key")
    run_this: str = Field(description="on the device, with the ticket in FILE")


class RevokedAnswer(AnswerModel):
    """A revoked member, or a withdrawn ticket."""

    client: str | None = Field(description="the member's id; None for a ticket")
    name: str
    withdrawn: bool = Field(description="it was an open ticket")
    behind: list[str] = Field(description="members that can connect only through it, a relay")
    tickets: list[str] = Field(description="names on open tickets that were withdrawn with it")


class ModeAnswer(AnswerModel):
    """The server's mode after the act."""

    mode: str = Field(description="running, paused or draining")
    round_open: bool


class DoneAnswer(AnswerModel):
    """An act without a further answer."""

    says: str


class NamesAnswer(AnswerModel):
    """The class names that a change concerned."""

    names: list[str]


class SubmittedAnswer(AnswerModel):
    """A run that was submitted."""

    number: int
    title: str
    before: int = Field(description="runs that wait before it")
    begins: bool = Field(description="it begins now")


class CancelledAnswer(AnswerModel):
    """A run that was removed from the queue."""

    number: int
    title: str


class StoppedRunAnswer(AnswerModel):
    """A run that was ended for good."""

    run: str
    next: bool = Field(description="the next run of the queue begins; else the server stops")


class PromotedAnswer(AnswerModel):
    """The state whose model clients use."""

    run: str
    state: int
    task: int
    promoted: bool = Field(description="False: the newest from now on")
    clients: int = Field(description="connected clients that were offered the model")


class ErasedAnswer(AnswerModel):
    """An erased client."""

    client: str
    name: str = Field(description="its name until now; it is stored nowhere any more")
    pseudonym: str = Field(description="its name from now on")
    gone: list[str] = Field(description="what was removed, in sentences")
    stays: list[str] = Field(description="what could not be removed")


class ExportErrorAnswer(AnswerModel):
    """Why an export failed."""

    code: str
    message: str
    action: str


class ExportAnswer(AnswerModel):
    """An export."""

    id: str
    run: str
    state: str = Field(description="number of the state")
    format: str
    by: str
    status: str = Field(description="running, done or failed")
    started_at: Moment
    ended_at: Moment | None
    name: str | None = Field(description="of the file; None before it is complete")
    bytes: int | None
    error: ExportErrorAnswer | None


class ExportsAnswer(AnswerModel):
    """The newest exports, the oldest first."""

    exports: list[ExportAnswer]
