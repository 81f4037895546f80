"""What a client's session hears (events) and what it says is to be done (instructions)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RoundOpen, Verdict


class Link(StrEnum):
    """Region one of a session: how far the client is with the server."""

    OFFLINE = "offline"
    GREETING = "greeting"
    PREPARING = "preparing"
    ANNOUNCING = "announcing"
    READY = "ready"


class Work(StrEnum):
    """Region two: what it does in the current round."""

    IDLE = "idle"
    FETCHING = "fetching"
    WORKING = "working"
    SENDING = "sending"


# --- events: the link -----------------------------------------------------------------------


@dataclass(frozen=True)
class LinkUp:
    """A connection to the server stands."""


@dataclass(frozen=True)
class LinkDown:
    """The connection is gone; the transport goes on trying."""


@dataclass(frozen=True)
class Welcomed:
    """The server's signed Welcome was verified.

    Attributes:
        ready: the server holds that this client has nothing left to load for the run.
    """

    run: str
    ready: bool
    verdict: Verdict | None = None


@dataclass(frozen=True)
class HelloRefused:
    """The server cannot take the Hello now."""


@dataclass(frozen=True)
class BackboneReady:
    """The worker has loaded the backbone of this run."""

    run: str


@dataclass(frozen=True)
class BackboneFailed:
    """The worker could not load the backbone of this run; another try may succeed."""

    run: str


@dataclass(frozen=True)
class Scanned:
    """The folder was looked through; its classes are known."""


@dataclass(frozen=True)
class ScanFailed:
    """The folder could not be looked through."""


@dataclass(frozen=True)
class Announced:
    """The server has stored which classes this client holds."""


@dataclass(frozen=True)
class InventoryRefused:
    """The server does not take the list of classes."""

    code: str


@dataclass(frozen=True)
class TryAgain:
    """A pause is over; what the link was about then is done again, if it still is."""

    link: Link


@dataclass(frozen=True)
class Barred:
    """The device may not work now; what the worker does stands still.

    Attributes:
        text: why, in words; they stay here.
    """

    text: str


@dataclass(frozen=True)
class Freed:
    """The device may work again; what stood still goes on."""


@dataclass(frozen=True)
class PatienceOver:
    """Work has stood still for as long as others may be kept waiting.

    Attributes:
        bar: the how manyeth `Barred` it is about.
    """

    bar: int


@dataclass(frozen=True)
class FolderChanged:
    """Images came or went in the data folder, or it is to be looked through again."""


# --- events: the work -----------------------------------------------------------------------


@dataclass(frozen=True)
class RoundOpened:
    """The server asks for an update (again, after a reconnect)."""

    order: RoundOpen


@dataclass(frozen=True)
class PartsReady:
    """All parts of the order are on disk and verified."""

    key: RoundKey


@dataclass(frozen=True)
class FetchFailed:
    """A part is not to be had, or cannot be kept."""

    key: RoundKey
    code: str
    text: str


@dataclass(frozen=True)
class PartsLost:
    """A part on disk turned out to be damaged; it must be fetched again.

    Attributes:
        text: which one, and how.
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
    """No update could be made.

    Attributes:
        code: the error's stable code; the server is told this and nothing more.
        text: the sentence, which may name files and classes and stays here.
    """

    key: RoundKey
    code: str
    text: str


@dataclass(frozen=True)
class OfferFailed:
    """The update may not go out: it cannot be written down that it does.

    Attributes:
        code, text: as in `WorkFailed`.
    """

    digest: str
    code: str
    text: str


@dataclass(frozen=True)
class Acked:
    """The server has the update on disk."""

    digest: str


@dataclass(frozen=True)
class Nacked:
    """The server refuses the update."""

    digest: str
    code: str


@dataclass(frozen=True)
class RetryDue:
    """The pause after a passing failure of the server is over."""

    digest: str


@dataclass(frozen=True)
class RoundOver:
    """The server closed the round."""

    key: RoundKey
    verdict: Verdict | None = None


Event = (
    LinkUp | LinkDown | Welcomed | HelloRefused | BackboneReady | BackboneFailed | Scanned
    | ScanFailed | Announced | InventoryRefused | TryAgain | Barred | Freed | PatienceOver
    | FolderChanged | RoundOpened | PartsReady | FetchFailed | PartsLost | WorkDone | WorkFailed
    | OfferFailed | Acked | Nacked | RetryDue | RoundOver
)  # fmt: skip

# --- instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Greet:
    """Send Hello."""


@dataclass(frozen=True)
class EnterRun:
    """Forget everything that was learned or is on its way for another run."""

    run: str


@dataclass(frozen=True)
class LoadBackbone:
    """Have the worker load the backbone and compute the probe features."""


@dataclass(frozen=True)
class Scan:
    """Have the worker look through the folder."""


@dataclass(frozen=True)
class Announce:
    """Tell the server, sealed, which classes the last scan found; none before the first."""


@dataclass(frozen=True)
class HoldNothing:
    """Take the list of classes to be empty until the next scan."""


@dataclass(frozen=True)
class Fetch:
    """Ask for the parts of this order that are not on disk."""

    order: RoundOpen


@dataclass(frozen=True)
class Train:
    """Let the worker do the round's work and seal the result into the outbox."""

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
    """Feed this event after a pause; the same one waits only once."""

    event: Event
    pause_s: float


@dataclass(frozen=True)
class Drop:
    """Remove an update from the outbox, and the state that came with it."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Forget:
    """The update is safe at the server: remove it from the outbox, keep its state provisional."""

    digest: str


@dataclass(frozen=True)
class Settle:
    """Keep or discard the provisional state, as the server's verdict says."""

    verdict: Verdict


@dataclass(frozen=True)
class Refuse:
    """Send Decline with the code; say the sentence here."""

    key: RoundKey
    code: str
    text: str


Instruction = (
    Greet | EnterRun | LoadBackbone | Scan | Announce | HoldNothing | Fetch | Train | CancelWork
    | Offer | Later | Drop | Forget | Settle | Refuse
)  # fmt: skip
