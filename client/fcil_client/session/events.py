"""Events that a client's session handles, and the instructions that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RoundOpen, UseModel, Verdict


class Link(StrEnum):
    """Region one of a session: progress of the link to the server."""

    OFFLINE = "offline"
    GREETING = "greeting"
    PREPARING = "preparing"
    ANNOUNCING = "announcing"
    READY = "ready"


class Work(StrEnum):
    """Region two: progress of the current round."""

    IDLE = "idle"
    FETCHING = "fetching"
    WORKING = "working"
    SENDING = "sending"


# --- events: the link -----------------------------------------------------------------------


@dataclass(frozen=True)
class LinkUp:
    """A connection to the server is up."""


@dataclass(frozen=True)
class LinkDown:
    """The connection is lost; the transport keeps trying."""


@dataclass(frozen=True)
class Welcomed:
    """The server's signed Welcome was verified.

    Attributes:
        ready: the server finds that this client has nothing left to load for the run.
    """

    run: str
    ready: bool
    verdict: Verdict | None = None


@dataclass(frozen=True)
class HelloRefused:
    """The server cannot accept the Hello now."""


@dataclass(frozen=True)
class BackboneReady:
    """The worker has loaded the backbone of this run."""

    run: str


@dataclass(frozen=True)
class BackboneFailed:
    """The worker could not load the backbone of this run; a retry may succeed."""

    run: str


@dataclass(frozen=True)
class Scanned:
    """The worker has scanned the data folder; its classes are known."""


@dataclass(frozen=True)
class ScanFailed:
    """The worker could not scan the data folder."""


@dataclass(frozen=True)
class Announced:
    """The server has stored the list of classes that this client holds."""


@dataclass(frozen=True)
class InventoryRefused:
    """The server rejects the list of classes."""

    code: str


@dataclass(frozen=True)
class TryAgain:
    """A pause is over; the link step that failed is repeated if it is still due."""

    link: Link


@dataclass(frozen=True)
class Paused:
    """The device may not work now; the worker is suspended.

    Attributes:
        text: the reason as a sentence; it stays on this device.
    """

    text: str


@dataclass(frozen=True)
class Resumed:
    """The device may work again; the worker resumes."""


@dataclass(frozen=True)
class PauseTimeout:
    """The worker has been suspended for as long as others may be kept waiting.

    Attributes:
        pause: sequence number of the `Paused` that started this timer.
    """

    pause: int


@dataclass(frozen=True)
class FolderChanged:
    """Images were added to or removed from the data folder, or a rescan is due."""


# --- events: the work -----------------------------------------------------------------------


@dataclass(frozen=True)
class RoundOpened:
    """The server requests an update (again, after a reconnect)."""

    order: RoundOpen


@dataclass(frozen=True)
class PartsReady:
    """All parts of the order are on disk and verified."""

    key: RoundKey


@dataclass(frozen=True)
class FetchFailed:
    """A part cannot be fetched or stored."""

    key: RoundKey
    code: str
    text: str


@dataclass(frozen=True)
class PartsLost:
    """A part on disk is damaged and must be fetched again.

    Attributes:
        text: the part and its damage.
    """

    key: RoundKey
    text: str


@dataclass(frozen=True)
class WorkDone:
    """The update is sealed in the outbox."""

    key: RoundKey
    digest: str


@dataclass(frozen=True)
class WorkFailed:
    """No update could be produced.

    Attributes:
        code: the error's stable code, which is all that the server receives.
        text: the sentence, which may name files and classes and stays on this device.
    """

    key: RoundKey
    code: str
    text: str


@dataclass(frozen=True)
class OfferFailed:
    """The update may not be sent: the journal cannot record it.

    Attributes:
        code, text: as in `WorkFailed`.
    """

    digest: str
    code: str
    text: str


@dataclass(frozen=True)
class Acked:
    """The server has stored the update on disk."""

    digest: str


@dataclass(frozen=True)
class Nacked:
    """The server rejects the update."""

    digest: str
    code: str


@dataclass(frozen=True)
class RetryDue:
    """The pause after a transient failure of the server is over."""

    digest: str


@dataclass(frozen=True)
class RoundOver:
    """The server closed the round."""

    key: RoundKey
    verdict: Verdict | None = None


# --- events: a model outside of rounds ------------------------------------------------------


@dataclass(frozen=True)
class ModelOffered:
    """The server wants clients to use this model.

    Attributes:
        held: it is the current one already.
    """

    model: UseModel
    held: bool = False


@dataclass(frozen=True)
class ModelFetched:
    """All parts of an offered model are on disk and verified."""

    model: UseModel


@dataclass(frozen=True)
class ModelKept:
    """An offered model is the current one."""

    model: UseModel


@dataclass(frozen=True)
class ModelFailed:
    """An offered model could not be fetched or kept."""

    model: UseModel


Event = (
    LinkUp | LinkDown | Welcomed | HelloRefused | BackboneReady | BackboneFailed | Scanned
    | ScanFailed | Announced | InventoryRefused | TryAgain | Paused | Resumed | PauseTimeout
    | FolderChanged | RoundOpened | PartsReady | FetchFailed | PartsLost | WorkDone | WorkFailed
    | OfferFailed | Acked | Nacked | RetryDue | RoundOver
    | ModelOffered | ModelFetched | ModelKept | ModelFailed
)  # fmt: skip

# --- instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Greet:
    """Send Hello."""


@dataclass(frozen=True)
class EnterRun:
    """Forget all state and pending messages of any other run."""

    run: str


@dataclass(frozen=True)
class LoadBackbone:
    """Have the worker load the backbone and compute the probe features."""


@dataclass(frozen=True)
class Scan:
    """Have the worker scan the data folder."""


@dataclass(frozen=True)
class Announce:
    """Send the sealed list of the classes found by the last scan; an empty one before the first."""


@dataclass(frozen=True)
class HoldNothing:
    """Treat the list of classes as empty until the next scan."""


@dataclass(frozen=True)
class Fetch:
    """Request the parts of this order that are not on disk."""

    order: RoundOpen


@dataclass(frozen=True)
class Train:
    """Have the worker do the round and seal the result into the outbox."""

    order: RoundOpen


@dataclass(frozen=True)
class CancelWork:
    """Stop the worker's current round."""

    key: RoundKey


@dataclass(frozen=True)
class Offer:
    """Send the update from the outbox (again)."""

    digest: str


@dataclass(frozen=True)
class Later:
    """Feed this event after a pause; equal events share one timer."""

    event: Event
    pause_s: float


@dataclass(frozen=True)
class Drop:
    """Remove an update from the outbox, and the state that came with it."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Forget:
    """The server has stored the update: remove it from the outbox, keep its state provisional."""

    digest: str


@dataclass(frozen=True)
class Settle:
    """Keep or discard the provisional state, according to the server's verdict."""

    verdict: Verdict


@dataclass(frozen=True)
class FetchModel:
    """Request the parts of an offered model that are not on disk."""

    model: UseModel


@dataclass(frozen=True)
class KeepModel:
    """Make an offered model the current one."""

    model: UseModel


@dataclass(frozen=True)
class Refuse:
    """Send Decline with the code; show the sentence on this device."""

    key: RoundKey
    code: str
    text: str


Instruction = (
    Greet | EnterRun | LoadBackbone | Scan | Announce | HoldNothing | Fetch | Train | CancelWork
    | Offer | Later | Drop | Forget | Settle | Refuse | FetchModel | KeepModel
)  # fmt: skip
