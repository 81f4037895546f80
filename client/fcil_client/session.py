"""A client's side of the federation as a pure machine: events in, instructions out.

Two regions run side by side. The link:

    offline --LinkUp--> greeting --Welcomed--> preparing --BackboneReady--> greeting
       ^                    |                                                  |
       |                    +---------------Welcomed(ready)--> announcing <----+
       +---LinkDown (from anywhere)                                |
                                                        ready <--Announced

and the work, which goes on while the link is away:

    idle --RoundOpened--> fetching --PartsReady--> working --WorkDone--> sending --Acked--> idle

``Session.TABLE`` at the end of the file is the whole transition table; events that are not
in it for a state are ignored. The daemon executes instructions and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from fcil_protocol.messages import RoundOpen, Verdict

# Nacks that speak of the server's state, not of the update: it is kept and offered again.
PASSING = frozenset({"disk_full", "storage_failed", "internal", "timeout"})


class Link(StrEnum):
    """Region one: how far the client is with the server."""

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


@dataclass(frozen=True)
class RoundKey:
    """Names one exchange; at most one update per client is accepted for it."""

    run: str
    task: int
    kind: str
    round: int

    def __str__(self) -> str:
        return f"task {self.task} {self.kind} round {self.round}"


def key_of(message: RoundOpen) -> RoundKey:
    """Return the key of a RoundOpen."""
    return RoundKey(message.run, message.task, message.kind, message.round)


# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkUp:
    """A connection to the server stands."""


@dataclass(frozen=True)
class LinkDown:
    """The connection is gone; the transport goes on trying."""


@dataclass(frozen=True)
class Welcomed:
    """The server's signed Welcome was verified."""

    ready: bool
    verdict: Verdict | None = None


@dataclass(frozen=True)
class BackboneReady:
    """The worker has loaded the backbone that the Welcome names."""


@dataclass(frozen=True)
class Announced:
    """The server has stored which classes this client holds."""


@dataclass(frozen=True)
class FolderChanged:
    """Images came or went in the data folder."""


@dataclass(frozen=True)
class RoundOpened:
    """The server asks for an update (again, after a reconnect)."""

    order: RoundOpen


@dataclass(frozen=True)
class PartsReady:
    """All parts of the order are on disk and verified."""

    key: RoundKey


@dataclass(frozen=True)
class PartsLost:
    """A part on disk turned out to be damaged; it must be fetched again."""

    key: RoundKey


@dataclass(frozen=True)
class WorkDone:
    """The update is sealed in the outbox."""

    key: RoundKey
    digest: str


@dataclass(frozen=True)
class WorkFailed:
    """The worker could not produce an update."""

    key: RoundKey
    reason: str


@dataclass(frozen=True)
class Acked:
    """The server has the update on disk."""

    digest: str


@dataclass(frozen=True)
class Nacked:
    """The server refuses the update for good."""

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
    LinkUp | LinkDown | Welcomed | BackboneReady | Announced | FolderChanged | RoundOpened
    | PartsReady | PartsLost | WorkDone | WorkFailed | Acked | Nacked | RetryDue | RoundOver
)  # fmt: skip

# --- instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Greet:
    """Send Hello."""


@dataclass(frozen=True)
class LoadBackbone:
    """Have the worker load the backbone and compute the probe features."""


@dataclass(frozen=True)
class Announce:
    """Scan the folder if it changed, and tell the server, sealed, which classes are held."""


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
class OfferLater:
    """The server could not keep the update now: offer it again after a pause."""

    digest: str


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
    """Send Decline."""

    key: RoundKey
    reason: str


Instruction = (
    Greet | LoadBackbone | Announce | Fetch | Train | CancelWork | Offer | OfferLater | Drop
    | Forget | Settle | Refuse
)  # fmt: skip


def _settle(verdict: Verdict | None) -> list[Instruction]:
    # Always first: the update that is dropped next may be the very one that was counted.
    return [Settle(verdict)] if verdict is not None else []


@dataclass
class Session:
    """State of one client; only `handle` changes it."""

    link: Link = Link.OFFLINE
    work: Work = Work.IDLE
    order: RoundOpen | None = None
    outgoing: str = ""  # digest in the outbox; set exactly while `work` is sending
    backbone_ready: bool = False
    folder_changed: bool = field(default=False)

    @classmethod
    def resume(cls, order: RoundOpen | None, outgoing: str) -> Session:
        """Start with what the outbox held when the daemon stopped."""
        work = Work.SENDING if outgoing else Work.IDLE
        return cls(work=work, order=order if outgoing else None, outgoing=outgoing)

    @property
    def key(self) -> RoundKey | None:
        """The round that the work region is about."""
        return key_of(self.order) if self.order is not None else None

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what is to be done, in order."""
        kind = type(event)
        handler = self.TABLE.get((self.link, kind)) or self.TABLE.get((self.work, kind))
        handler = handler or self.TABLE.get((None, kind))
        return handler(self, event) if handler is not None else []

    # --- link -------------------------------------------------------------------------------

    def _up(self, _: LinkUp) -> list[Instruction]:
        self.link = Link.GREETING
        return [Greet()]

    def _down(self, _: LinkDown) -> list[Instruction]:
        self.link = Link.OFFLINE
        return []

    def _welcomed(self, event: Welcomed) -> list[Instruction]:
        if event.ready:
            self.link = Link.ANNOUNCING
            return [*_settle(event.verdict), Announce()]
        self.link = Link.PREPARING
        return [*_settle(event.verdict), LoadBackbone()]

    def _prepared(self, _: BackboneReady) -> list[Instruction]:
        self.backbone_ready = True
        self.link = Link.GREETING
        return [Greet()]

    def _announced(self, _: Announced) -> list[Instruction]:
        self.link = Link.READY
        return [Offer(self.outgoing)] if self.work is Work.SENDING else self._idle()

    def _changed(self, _: FolderChanged) -> list[Instruction]:
        self.folder_changed = True
        return self._idle()

    def _idle(self) -> list[Instruction]:
        # A changed folder is announced between rounds, never in the middle of one.
        if self.folder_changed and self.link is Link.READY and self.work is Work.IDLE:
            self.folder_changed = False
            return [Announce()]
        return []

    # --- work -------------------------------------------------------------------------------

    def _start(self, event: RoundOpened, *end: Instruction) -> list[Instruction]:
        self.work, self.order, self.outgoing = Work.FETCHING, event.order, ""
        return [*_settle(event.order.verdict), *end, Fetch(event.order)]

    def _asked_while_working(self, event: RoundOpened) -> list[Instruction]:
        assert self.order is not None
        if key_of(event.order) == self.key and event.order.base == self.order.base:
            return []
        return self._start(event, CancelWork(key_of(self.order)))

    def _asked_while_sending(self, event: RoundOpened) -> list[Instruction]:
        assert self.order is not None
        if key_of(event.order) == self.key and event.order.base == self.order.base:
            return [Offer(self.outgoing)]
        return self._start(event, Drop(self.outgoing, "another round has begun"))

    def _fetched(self, event: PartsReady) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        self.work = Work.WORKING
        return [Train(self.order)]

    def _lost(self, event: PartsLost) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        self.work = Work.FETCHING
        return [Fetch(self.order)]

    def _done(self, event: WorkDone) -> list[Instruction]:
        if event.digest == self.outgoing:
            return []
        if event.key != self.key or self.work is not Work.WORKING:
            return [Drop(event.digest, "its round is over, or starts from another state")]
        self.work, self.outgoing = Work.SENDING, event.digest
        return [Offer(event.digest)] if self.link is Link.READY else []

    def _failed(self, event: WorkFailed) -> list[Instruction]:
        if event.key != self.key:
            return []
        self.work, self.order = Work.IDLE, None
        return [Refuse(event.key, event.reason), *self._idle()]

    def _acked(self, event: Acked) -> list[Instruction]:
        if event.digest != self.outgoing:
            return [Forget(event.digest)]
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [Forget(event.digest), *self._idle()]

    def _nacked(self, event: Nacked) -> list[Instruction]:
        if event.code in PASSING:
            return [OfferLater(event.digest)] if event.digest == self.outgoing else []
        # The server may hold this very update already: then its state stays provisional.
        had = event.code == "already_have"
        out: Instruction = Forget(event.digest) if had else Drop(event.digest, event.code)
        if event.digest != self.outgoing:
            return [out]
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [out, *self._idle()]

    def _retry(self, event: RetryDue) -> list[Instruction]:
        due = event.digest == self.outgoing and self.link is Link.READY
        return [Offer(event.digest)] if due else []

    def _over(self, event: RoundOver) -> list[Instruction]:
        out = _settle(event.verdict)
        if event.key == self.key:
            if self.work is Work.SENDING:
                out.append(Drop(self.outgoing, "its round is over"))
            elif self.work is not Work.IDLE:
                out.append(CancelWork(event.key))
            self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [*out, *self._idle()]

    TABLE: ClassVar[dict[tuple[Link | Work | None, type], Callable[..., list[Instruction]]]] = {
        (None, LinkUp): _up,
        (None, LinkDown): _down,
        (Link.GREETING, Welcomed): _welcomed,
        (Link.PREPARING, BackboneReady): _prepared,
        (Link.ANNOUNCING, Announced): _announced,
        (None, FolderChanged): _changed,
        (Work.IDLE, RoundOpened): _start,
        (Work.FETCHING, RoundOpened): _start,
        (Work.WORKING, RoundOpened): _asked_while_working,
        (Work.SENDING, RoundOpened): _asked_while_sending,
        (Work.FETCHING, PartsReady): _fetched,
        (Work.WORKING, PartsLost): _lost,
        (None, WorkDone): _done,
        (Work.WORKING, WorkFailed): _failed,
        (None, Acked): _acked,
        (None, Nacked): _nacked,
        (Work.SENDING, RetryDue): _retry,
        (None, RoundOver): _over,
    }
