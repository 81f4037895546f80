"""A client's session with the server as a pure state machine: events in, instructions out.

Two regions run in parallel. The link:

    offline --LinkUp--> greeting --Welcomed--> preparing --BackboneReady--> greeting
       ^                    |                                                  |
       |                    +---------------Welcomed(ready)--> announcing <----+
       +---LinkDown (from anywhere)                                |
                                                        ready <--Announced

and the work, which continues while the link is down:

    idle --RoundOpened--> fetching --PartsReady--> working --WorkDone--> sending --Acked--> idle

``ClientSession.TABLE`` at the end of the file is the complete transition table; events that it does
not list for a state are ignored. The daemon executes instructions and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fcil_client.session.events import (
    Acked,
    Announce,
    Announced,
    BackboneFailed,
    BackboneReady,
    Barred,
    CancelWork,
    Drop,
    EnterRun,
    Event,
    Fetch,
    FetchFailed,
    FolderChanged,
    Forget,
    Freed,
    Greet,
    HelloRefused,
    HoldNothing,
    Instruction,
    InventoryRefused,
    Later,
    Link,
    LinkDown,
    LinkUp,
    LoadBackbone,
    Nacked,
    Offer,
    OfferFailed,
    PartsLost,
    PartsReady,
    PatienceOver,
    Refuse,
    RetryDue,
    RoundOpened,
    RoundOver,
    Scan,
    ScanFailed,
    Scanned,
    Settle,
    Train,
    TryAgain,
    Welcomed,
    Work,
    WorkDone,
    WorkFailed,
)
from fcil_protocol.errors import CorruptFile, NotNow
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RoundOpen, Verdict

# Nacks about the server's state, not about the update: it is offered again.
PASSING = frozenset({"disk_full", "storage_failed", "internal", "not_yet"})
# Nacks of bytes that were intact when sent: a bit may have flipped in transit or in a relay.
DAMAGED = frozenset({"malformed", "bad_signature", "cannot_open"})
RESENDS = 2  # of a message rejected as damaged
REFETCHES = 3  # of one order's parts: a disk that damages files keeps doing so
# Nacks after which the round needs nothing more from this client.
OVER = frozenset({
    "round_closed", "surplus", "already_have", "stale_update", "wrong_federation",
})  # fmt: skip
SERVER_RETRY_S = 10.0  # before a message is offered again to a server that could not accept it
LOCAL_RETRY_S = 60.0  # before the worker retries after a failure on this side
PAUSE_LIMIT_S = 120.0  # work may be suspended for this long before the round continues without it


def _settle(verdict: Verdict | None) -> list[Instruction]:
    # Always first: the update that is dropped next may be the one that was counted.
    return [Settle(verdict)] if verdict is not None else []


@dataclass
class ClientSession:
    """State of one client's session; only `handle` changes it.

    Attributes:
        outgoing: digest in the outbox; set exactly while `work` is sending.
        resent: number of times that it was offered again after a rejection as damaged.
        retold: the same for the list of classes.
        refetched: number of times that the order's parts were refetched after loss on disk.
        run: run of the last Welcome.
        backbone_ready: the backbone of that run is loaded.
        scanned: a scan of the folder has succeeded.
        scanning: a scan is running.
        folder_changed: the folder changed since the last scan began.
        withdrawn: the server rejected the last scan's classes; the list is empty since.
        barred: why the device may not work now; empty: it may.
        bars: number of times that it was barred.
        rests: it declined a round while barred, and must announce when it may work again.
        patience_s: seconds of suspended work before the round continues without it.
    """

    link: Link = Link.OFFLINE
    work: Work = Work.IDLE
    order: RoundOpen | None = None
    outgoing: str = ""
    resent: int = 0
    retold: int = 0
    refetched: int = 0
    run: str = ""
    backbone_ready: bool = False
    scanned: bool = False
    scanning: bool = False
    folder_changed: bool = False
    withdrawn: bool = False
    barred: str = ""
    bars: int = 0
    rests: bool = False
    patience_s: float = PAUSE_LIMIT_S

    @classmethod
    def resume(cls, order: RoundOpen | None, outgoing: str) -> ClientSession:
        """Start with the order and update left in the outbox when the daemon stopped."""
        work = Work.SENDING if outgoing else Work.IDLE
        return cls(work=work, order=order if outgoing else None, outgoing=outgoing)

    @property
    def key(self) -> RoundKey | None:
        """The round of the work region."""
        return self.order.key if self.order is not None else None

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions to execute, in order."""
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
        out = _settle(event.verdict)
        if self.order is not None and self.order.run != event.run:
            out += self._abandon("another run has begun")
        if self.run != event.run:
            self.run, self.backbone_ready = event.run, False
            out.append(EnterRun(event.run))
        if event.ready and self.backbone_ready:
            self.link = Link.ANNOUNCING
            return [*out, *self._announce()]
        self.link = Link.PREPARING
        return [*out, LoadBackbone()]

    def _unheard(self, _: HelloRefused) -> list[Instruction]:
        return [Later(TryAgain(self.link), SERVER_RETRY_S)]

    def _prepared(self, event: BackboneReady) -> list[Instruction]:
        if event.run != self.run:
            return []
        self.backbone_ready = True
        self.link = Link.GREETING
        return [Greet()]

    def _unprepared(self, event: BackboneFailed) -> list[Instruction]:
        return [Later(TryAgain(self.link), LOCAL_RETRY_S)] if event.run == self.run else []

    def _again(self, event: TryAgain) -> list[Instruction]:
        if event.link is not self.link:
            return []
        what: dict[Link, Instruction] = {Link.GREETING: Greet(), Link.PREPARING: LoadBackbone()}
        return [what[self.link]] if self.link in what else self._tell()

    # --- inventory --------------------------------------------------------------------------

    def _announce(self) -> list[Instruction]:
        """Announce the last scan after a Welcome, or scan if there is none or the folder changed.

        No scan starts while the worker trains: the client would be away until training is done.
        """
        due = not self.scanned or (self.folder_changed and self.work is Work.IDLE)
        return self._scan() if due and self.work is not Work.WORKING else [Announce()]

    def _scan(self) -> list[Instruction]:
        if self.scanning:
            return []  # when this scan ends, it announces and starts the next one if due
        self.scanning, self.folder_changed = True, False
        return [Scan()]

    def _tell(self) -> list[Instruction]:
        return [Announce()] if self.link in (Link.ANNOUNCING, Link.READY) else []

    def _scanned(self, _: Scanned) -> list[Instruction]:
        self.scanning, self.scanned, self.withdrawn = False, True, False
        return [*self._tell(), *self._idle()]

    def _unscanned(self, _: ScanFailed) -> list[Instruction]:
        self.scanning = False
        return [Later(FolderChanged(), LOCAL_RETRY_S), *self._tell(), *self._idle()]

    def _announced(self, _: Announced) -> list[Instruction]:
        self.link, self.retold = Link.READY, 0
        return [Offer(self.outgoing)] if self.work is Work.SENDING else self._idle()

    def _told(self, _: Announced) -> list[Instruction]:
        self.retold = 0
        return []

    def _unannounced(self, event: InventoryRefused) -> list[Instruction]:
        damaged = event.code in DAMAGED and self.retold < RESENDS
        if damaged or event.code in PASSING:
            self.retold += damaged
            return [Later(TryAgain(self.link), SERVER_RETRY_S)]
        out: list[Instruction] = []
        if not self.withdrawn:  # once: if an empty list is rejected too, nothing more is sent
            self.withdrawn = True
            out = [HoldNothing(), Announce()]
        return [*out, *(self._announced(Announced()) if self.link is Link.ANNOUNCING else ())]

    def _changed(self, _: FolderChanged) -> list[Instruction]:
        self.folder_changed = True
        return self._idle()

    def _idle(self) -> list[Instruction]:
        # A changed folder is scanned between rounds, never during one.
        free = self.link is Link.READY and self.work is Work.IDLE
        return self._scan() if self.folder_changed and free else []

    # --- work -------------------------------------------------------------------------------

    def _start(self, event: RoundOpened, *end: Instruction) -> list[Instruction]:
        if event.order.run != self.run:  # its terms are unknown
            return _settle(event.order.verdict)
        if self.barred:  # at once, so that the server does not wait
            self.work, self.order, self.outgoing = Work.IDLE, None, ""
            return [*_settle(event.order.verdict), *end, self._rest(event.order.key)]
        if not self._has(event.order):
            self.refetched = 0
        self.work, self.order, self.outgoing = Work.FETCHING, event.order, ""
        return [*_settle(event.order.verdict), *end, Fetch(event.order)]

    def _has(self, order: RoundOpen) -> bool:
        """Return True if the current work is for this order: same round, same base state."""
        mine = self.order
        return mine is not None and order.key == mine.key and order.base == mine.base

    def _asked_while_working(self, event: RoundOpened) -> list[Instruction]:
        assert self.order is not None
        if self._has(event.order):
            return []
        return self._start(event, CancelWork(self.order.key))

    def _asked_while_sending(self, event: RoundOpened) -> list[Instruction]:
        if self._has(event.order):
            return [Offer(self.outgoing)] if self.link is Link.READY else []
        return self._start(event, Drop(self.outgoing, "another round has begun"))

    def _abandon(self, reason: str) -> list[Instruction]:
        out: list[Instruction] = []
        if self.work is Work.SENDING:
            out = [Drop(self.outgoing, reason)]
        elif self.key is not None:
            out = [CancelWork(self.key)]
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return out

    def _fetched(self, event: PartsReady) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        self.work = Work.WORKING
        return [Train(self.order)]

    def _lost(self, event: PartsLost) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        if self.refetched >= REFETCHES:
            text = f"{event.text} Its parts were fetched again {REFETCHES} times; check the disk."
            return self._failed(WorkFailed(event.key, CorruptFile.code, text))
        self.work, self.refetched = Work.FETCHING, self.refetched + 1
        return [Fetch(self.order)]

    def _done(self, event: WorkDone) -> list[Instruction]:
        if event.digest == self.outgoing:
            return []
        if event.key != self.key or self.work is not Work.WORKING:
            return [Drop(event.digest, "its round is over, or starts from another state")]
        self.work, self.outgoing, self.resent = Work.SENDING, event.digest, 0
        return [Offer(event.digest)] if self.link is Link.READY else []

    def _failed(self, event: FetchFailed | WorkFailed) -> list[Instruction]:
        if event.key != self.key:
            return []
        self.work, self.order = Work.IDLE, None
        return [Refuse(event.key, event.code, event.text), *self._idle()]

    def _unoffered(self, event: OfferFailed) -> list[Instruction]:
        if event.digest != self.outgoing or self.order is None:
            return []
        # The server may have received it before: then its state waits for the verdict.
        key = self.order.key
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [Forget(event.digest), Refuse(key, event.code, event.text), *self._idle()]

    def _acked(self, event: Acked) -> list[Instruction]:
        if event.digest != self.outgoing:
            return [Forget(event.digest)]
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [Forget(event.digest), *self._idle()]

    def _nacked(self, event: Nacked) -> list[Instruction]:
        mine = event.digest == self.outgoing
        if event.code in PASSING:
            return [Later(RetryDue(event.digest), SERVER_RETRY_S)] if mine else []
        if mine and event.code in DAMAGED and self.resent < RESENDS:
            self.resent += 1
            return [Later(RetryDue(event.digest), SERVER_RETRY_S)]
        # The server may hold this update already: then its state stays provisional.
        had = event.code == "already_have"
        out: list[Instruction] = [Forget(event.digest) if had else Drop(event.digest, event.code)]
        if not mine or self.order is None:
            return out
        if event.code not in OVER:  # so that the server does not wait for another one
            text = f"the update was refused ({event.code})"
            out.append(Refuse(self.order.key, event.code, text))
        self.work, self.order, self.outgoing = Work.IDLE, None, ""
        return [*out, *self._idle()]

    def _retry(self, event: RetryDue) -> list[Instruction]:
        due = event.digest == self.outgoing and self.link is Link.READY
        return [Offer(event.digest)] if due else []

    def _over(self, event: RoundOver) -> list[Instruction]:
        out = _settle(event.verdict)
        if event.key == self.key:
            out += self._abandon("its round is over")
        return [*out, *self._idle()]

    # --- rules of the device's owner --------------------------------------------------------

    def _rest(self, key: RoundKey) -> Instruction:
        self.rests = True
        return Refuse(key, NotNow.code, f"{self.barred}.")

    def _bar(self, event: Barred) -> list[Instruction]:
        if self.barred:
            self.barred = event.text
            return []
        self.barred, self.bars = event.text, self.bars + 1
        return [Later(PatienceOver(self.bars), self.patience_s)]

    def _tired(self, event: PatienceOver) -> list[Instruction]:
        unfinished = self.work in (Work.FETCHING, Work.WORKING)
        if not self.barred or event.bar != self.bars or self.key is None or not unfinished:
            return []
        refusal = self._rest(self.key)
        return [*self._abandon("the device may not work"), refusal]

    def _free(self, _: Freed) -> list[Instruction]:
        self.barred, rested, self.rests = "", self.rests, False
        # The server skips clients that rest; a new inventory tells it to ask again.
        return [Announce()] if rested and self.link is Link.READY else []

    TABLE: ClassVar[dict[tuple[Link | Work | None, type], Callable[..., list[Instruction]]]] = {
        (None, LinkUp): _up,
        (None, LinkDown): _down,
        (Link.GREETING, Welcomed): _welcomed,
        (Link.GREETING, HelloRefused): _unheard,
        (Link.PREPARING, BackboneReady): _prepared,
        (Link.PREPARING, BackboneFailed): _unprepared,
        (None, TryAgain): _again,
        (None, Scanned): _scanned,
        (None, ScanFailed): _unscanned,
        (Link.ANNOUNCING, Announced): _announced,
        (Link.READY, Announced): _told,
        (Link.ANNOUNCING, InventoryRefused): _unannounced,
        (Link.READY, InventoryRefused): _unannounced,
        (None, Barred): _bar,
        (None, Freed): _free,
        (None, PatienceOver): _tired,
        (None, FolderChanged): _changed,
        (Work.IDLE, RoundOpened): _start,
        (Work.FETCHING, RoundOpened): _start,
        (Work.WORKING, RoundOpened): _asked_while_working,
        (Work.SENDING, RoundOpened): _asked_while_sending,
        (Work.FETCHING, PartsReady): _fetched,
        (Work.FETCHING, FetchFailed): _failed,
        (Work.WORKING, PartsLost): _lost,
        (None, WorkDone): _done,
        (Work.WORKING, WorkFailed): _failed,
        (Work.SENDING, OfferFailed): _unoffered,
        (None, Acked): _acked,
        (None, Nacked): _nacked,
        (Work.SENDING, RetryDue): _retry,
        (None, RoundOver): _over,
    }
