"""A client's session with the server as a pure state machine: events in, instructions out.

Two regions run in parallel. The link:

    offline --LinkUp--> greeting --Welcomed--> preparing --BackboneReady--> greeting
       ^                    |                                                  |
       |                    +---------------Welcomed(ready)--> announcing <----+
       +---LinkDown (from anywhere)                                |
                                                        ready <--Announced

and the work, which continues while the link is down:

    idle --RoundOpened--> fetching --PartsReady--> working --WorkDone--> sending --Acked--> idle

A third one, `model_offer`, fetches a model that the server offers, while there is no round.

``ClientSession.TABLE`` at the end of the file is the complete transition table; events that it does
not list for a state are ignored. The daemon executes instructions and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from fcil_client.session.events import (
    Acked,
    Announce,
    Announced,
    BackboneFailed,
    BackboneReady,
    CancelWork,
    Drop,
    EnterRun,
    Event,
    Fetch,
    FetchFailed,
    FolderChanged,
    Forget,
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
    ModelFailed,
    ModelFetched,
    ModelKept,
    ModelOffered,
    Nacked,
    Offer,
    OfferFailed,
    PartsLost,
    PartsReady,
    Paused,
    PauseTimeout,
    Refuse,
    Resumed,
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
from fcil_client.session.model_offer import ModelOffer, ModelStage
from fcil_protocol.errors import CorruptFile, NotNow, NotYet
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
# The next round asks at once for an update that had to wait; this is for an order that is lost.
NOT_YET_RETRY_S = 120.0
LOCAL_RETRY_S = 60.0  # before the worker retries after a failure on this side
PAUSE_LIMIT_S = 120.0  # work may be suspended for this long before the round continues without it

State = Link | Work
Handler = Callable[..., list[Instruction]]
_BEGUN = (Work.FETCHING, Work.IDLE)  # idle: declined at once, since the device may not work


def _settle(verdict: Verdict | None) -> list[Instruction]:
    # Always first: the update that is dropped next may be the one that was counted.
    return [Settle(verdict)] if verdict is not None else []


@dataclass
class ClientSession:
    """State of one client's session; only `handle` changes it.

    Attributes:
        newer: the newest order in which the update of ``order`` will count; None while ``order`` is
            the newest.
        outgoing: digest in the outbox; set exactly while `work` is sending.
        resent: number of times that it was offered again after a rejection as damaged.
        reannounced: the same for the list of classes.
        refetched: number of times that the order's parts were refetched after loss on disk.
        run: run of the last Welcome.
        backbone_ready: the backbone of that run is loaded.
        scanned: a scan of the folder has succeeded.
        scanning: a scan is running.
        folder_changed: the folder changed since the last scan began.
        withdrawn: the server rejected the last scan's classes; the list is empty since.
        pause_reason: why the device may not work now; empty: it may.
        pauses: number of times that it was barred.
        declined_paused: it declined a round while barred, and must announce when it may work again.
        patience_s: seconds of suspended work before the round continues without it.
        offer: the model that the server offers outside of rounds.
    """

    link: Link = Link.OFFLINE
    work: Work = Work.IDLE
    order: RoundOpen | None = None
    newer: RoundOpen | None = None
    outgoing: str = ""
    resent: int = 0
    reannounced: int = 0
    refetched: int = 0
    run: str = ""
    backbone_ready: bool = False
    scanned: bool = False
    scanning: bool = False
    folder_changed: bool = False
    withdrawn: bool = False
    pause_reason: str = ""
    pauses: int = 0
    declined_paused: bool = False
    patience_s: float = PAUSE_LIMIT_S
    offer: ModelOffer = field(default_factory=ModelOffer)

    @classmethod
    def resume(cls, order: RoundOpen | None, outgoing: str) -> ClientSession:
        """Start with the order and update left in the outbox when the daemon stopped."""
        work = Work.SENDING if outgoing else Work.IDLE
        return cls(work=work, order=order if outgoing else None, outgoing=outgoing)

    @property
    def key(self) -> RoundKey | None:
        """The round of the work region."""
        return self.order.key if self.order is not None else None

    @property
    def awaited(self) -> RoundKey | None:
        """The newest round for which the server waits for the work region's update."""
        return self.key if self.newer is None else self.newer.key

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions to execute, in order."""
        kind, out = type(event), list[Instruction]()
        for state in (self.link, self.work, None):
            handler, _ = self.TABLE.get((state, kind), (None, ()))
            if handler is not None:
                out = handler(self, event)
                break
        free = self.link is Link.READY and self.work is Work.IDLE and not self.pause_reason
        return [*out, *self.offer.proceed(free=free)]

    # --- link -------------------------------------------------------------------------------

    def _on_link_up(self, _: LinkUp) -> list[Instruction]:
        self.link = Link.GREETING
        return [Greet()]

    def _on_link_down(self, _: LinkDown) -> list[Instruction]:
        self.link = Link.OFFLINE
        self.offer.end()
        return []

    def _on_welcomed(self, event: Welcomed) -> list[Instruction]:
        out = _settle(event.verdict)
        if self.order is not None and self.order.run != event.run:
            out += self._abandon("another run has begun")
        elif self.work is Work.FETCHING:
            # Nothing is fetched over a new link before the server asks again, which it does if the
            # round is open; what has come of the parts stays.
            self._end_work()
        if self.run != event.run:
            self.run, self.backbone_ready = event.run, False
            self.offer.end()
            out.append(EnterRun(event.run))
        if event.ready and self.backbone_ready:
            self.link = Link.ANNOUNCING
            return [*out, *self._announce()]
        self.link = Link.PREPARING
        return [*out, LoadBackbone()]

    def _on_hello_refused(self, _: HelloRefused) -> list[Instruction]:
        return [Later(TryAgain(self.link), SERVER_RETRY_S)]

    def _on_backbone_ready(self, event: BackboneReady) -> list[Instruction]:
        if event.run != self.run:
            return []
        self.backbone_ready = True
        self.link = Link.GREETING
        return [Greet()]

    def _on_backbone_failed(self, event: BackboneFailed) -> list[Instruction]:
        return [Later(TryAgain(self.link), LOCAL_RETRY_S)] if event.run == self.run else []

    def _on_try_again(self, event: TryAgain) -> list[Instruction]:
        if event.link is not self.link:
            return []
        what: dict[Link, Instruction] = {Link.GREETING: Greet(), Link.PREPARING: LoadBackbone()}
        return [what[self.link]] if self.link in what else self._reannounce()

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

    def _reannounce(self) -> list[Instruction]:
        return [Announce()] if self.link in (Link.ANNOUNCING, Link.READY) else []

    def _on_scanned(self, _: Scanned) -> list[Instruction]:
        self.scanning, self.scanned, self.withdrawn = False, True, False
        return [*self._reannounce(), *self._scan_if_due()]

    def _on_scan_failed(self, _: ScanFailed) -> list[Instruction]:
        self.scanning = False
        return [Later(FolderChanged(), LOCAL_RETRY_S), *self._reannounce(), *self._scan_if_due()]

    def _on_announced(self, _: Announced) -> list[Instruction]:
        self.link, self.reannounced = Link.READY, 0
        return [Offer(self.outgoing)] if self.work is Work.SENDING else self._scan_if_due()

    def _on_announced_again(self, _: Announced) -> list[Instruction]:
        self.reannounced = 0
        return []

    def _on_inventory_refused(self, event: InventoryRefused) -> list[Instruction]:
        damaged = event.code in DAMAGED and self.reannounced < RESENDS
        if damaged or event.code in PASSING:
            self.reannounced += damaged
            return [Later(TryAgain(self.link), SERVER_RETRY_S)]
        out: list[Instruction] = []
        if not self.withdrawn:  # once: if an empty list is rejected too, nothing more is sent
            self.withdrawn = True
            out = [HoldNothing(), Announce()]
        return [*out, *(self._on_announced(Announced()) if self.link is Link.ANNOUNCING else ())]

    def _on_folder_changed(self, _: FolderChanged) -> list[Instruction]:
        self.folder_changed = True
        return self._scan_if_due()

    def _scan_if_due(self) -> list[Instruction]:
        # A changed folder is scanned between rounds, never during one.
        free = self.link is Link.READY and self.work is Work.IDLE
        return self._scan() if self.folder_changed and free else []

    # --- work -------------------------------------------------------------------------------

    def _on_round_opened(self, event: RoundOpened, *end: Instruction) -> list[Instruction]:
        if event.order.run != self.run:  # its terms are unknown
            return _settle(event.order.verdict)
        if self.pause_reason:  # at once, so that the server does not wait
            self._end_work()
            return [*_settle(event.order.verdict), *end, self._decline_paused(event.order.key)]
        if not self._is_about(event.order):
            self.refetched = 0
        self.newer = None
        self.work, self.order, self.outgoing = Work.FETCHING, event.order, ""
        return [*_settle(event.order.verdict), *end, Fetch(event.order)]

    def _is_about(self, order: RoundOpen) -> bool:
        """Return True if the current work is for this order: same round, same base state."""
        mine = self.order
        return mine is not None and order.key == mine.key and order.base == mine.base

    def _counts_in(self, order: RoundOpen) -> bool:
        """Return True if the update at work may count in this later round (`oldest_base`).

        Not if the order's verdict is on that update: it has been counted or excluded.
        """
        mine, judged = self.order, order.verdict
        if mine is None or (judged is not None and judged.update == self.outgoing):
            return False
        return mine.key.precedes(order.key) and 0 <= order.oldest_base <= mine.base

    def _on_round_opened_while_working(self, event: RoundOpened) -> list[Instruction]:
        assert self.order is not None
        if self._is_about(event.order):
            return []
        if self._counts_in(event.order):
            self.newer = event.order
            return _settle(event.order.verdict)
        return self._on_round_opened(event, CancelWork(self.order.key))

    def _on_round_opened_while_sending(self, event: RoundOpened) -> list[Instruction]:
        ready = self.link is Link.READY
        offer: list[Instruction] = [Offer(self.outgoing)] if ready else []
        if self._is_about(event.order):
            return offer
        if self._counts_in(event.order):
            self.newer = event.order
            return [*_settle(event.order.verdict), *offer]
        return self._on_round_opened(event, Drop(self.outgoing, "another round has begun"))

    def _end_work(self) -> None:
        self.work, self.order, self.newer, self.outgoing = Work.IDLE, None, None, ""

    def _abandon(self, reason: str) -> list[Instruction]:
        out: list[Instruction] = []
        if self.work is Work.SENDING:
            out = [Drop(self.outgoing, reason)]
        elif self.key is not None:
            out = [CancelWork(self.key)]
        self._end_work()
        return out

    def _on_parts_ready(self, event: PartsReady) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        self.work = Work.WORKING
        return [Train(self.order)]

    def _on_parts_lost(self, event: PartsLost) -> list[Instruction]:
        if event.key != self.key or self.order is None:
            return []
        if self.refetched >= REFETCHES:
            text = f"{event.text} Its parts were fetched again {REFETCHES} times; check the disk."
            return self._on_failed(WorkFailed(event.key, CorruptFile.code, text))
        self.work, self.refetched = Work.FETCHING, self.refetched + 1
        self.order, self.newer = self.newer or self.order, None
        return [Fetch(self.order)]

    def _on_work_done(self, event: WorkDone) -> list[Instruction]:
        if event.digest == self.outgoing:
            return []
        if event.key != self.key or self.work is not Work.WORKING:
            return [Drop(event.digest, "its round is over, or starts from another state")]
        self.work, self.outgoing, self.resent = Work.SENDING, event.digest, 0
        return [Offer(event.digest)] if self.link is Link.READY else []

    def _on_failed(self, event: FetchFailed | WorkFailed) -> list[Instruction]:
        key = self.awaited
        if event.key != self.key or key is None:
            return []
        self._end_work()
        return [Refuse(key, event.code, event.text), *self._scan_if_due()]

    def _on_offer_failed(self, event: OfferFailed) -> list[Instruction]:
        key = self.awaited
        if event.digest != self.outgoing or key is None:
            return []
        # The server may have received it before: then its state waits for the verdict.
        self._end_work()
        return [Forget(event.digest), Refuse(key, event.code, event.text), *self._scan_if_due()]

    def _on_acked(self, event: Acked) -> list[Instruction]:
        if event.digest != self.outgoing:
            return [Forget(event.digest)]
        self._end_work()
        return [Forget(event.digest), *self._scan_if_due()]

    def _on_nacked(self, event: Nacked) -> list[Instruction]:
        mine = event.digest == self.outgoing
        if event.code in PASSING:
            pause_s = NOT_YET_RETRY_S if event.code == NotYet.code else SERVER_RETRY_S
            return [Later(RetryDue(event.digest), pause_s)] if mine else []
        if mine and event.code in DAMAGED and self.resent < RESENDS:
            self.resent += 1
            return [Later(RetryDue(event.digest), SERVER_RETRY_S)]
        # The server may hold this update already: then its state stays provisional.
        had = event.code == "already_have"
        out: list[Instruction] = [Forget(event.digest) if had else Drop(event.digest, event.code)]
        key = self.awaited
        if not mine or key is None:
            return out
        if event.code not in OVER:  # so that the server does not wait for another one
            text = f"the update was refused ({event.code})"
            out.append(Refuse(key, event.code, text))
        self._end_work()
        return [*out, *self._scan_if_due()]

    def _on_retry_due(self, event: RetryDue) -> list[Instruction]:
        due = event.digest == self.outgoing and self.link is Link.READY
        return [Offer(event.digest)] if due else []

    def _on_round_over(self, event: RoundOver) -> list[Instruction]:
        out = _settle(event.verdict)
        if event.key in (self.key, self.awaited):
            out += self._abandon("its round is over")
        return [*out, *self._scan_if_due()]

    # --- a model outside of rounds ----------------------------------------------------------

    def _on_model_offered(self, event: ModelOffered) -> list[Instruction]:
        if event.held and self.offer.state is not ModelStage.KEEPING:
            self.offer.end()  # also an earlier offer, which this one replaces
        elif event.model.run == self.run:
            self.offer.begin(event.model)
        return []

    def _on_model_fetched(self, event: ModelFetched) -> list[Instruction]:
        return self.offer.on_fetched(event)

    def _on_model_kept(self, event: ModelKept) -> list[Instruction]:
        self.offer.on_kept(event)
        return []

    def _on_model_failed(self, event: ModelFailed) -> list[Instruction]:
        self.offer.on_failed(event)
        return []

    # --- rules of the device's owner --------------------------------------------------------

    def _decline_paused(self, key: RoundKey) -> Instruction:
        self.declined_paused = True
        return Refuse(key, NotNow.code, f"{self.pause_reason}.")

    def _on_paused(self, event: Paused) -> list[Instruction]:
        if self.pause_reason:
            self.pause_reason = event.text
            return []
        self.pause_reason, self.pauses = event.text, self.pauses + 1
        return [Later(PauseTimeout(self.pauses), self.patience_s)]

    def _on_pause_timeout(self, event: PauseTimeout) -> list[Instruction]:
        key, begun = self.awaited, self.work in (Work.FETCHING, Work.WORKING)
        if not self.pause_reason or event.pause != self.pauses or key is None or not begun:
            return []
        refusal = self._decline_paused(key)
        ended = self._abandon("the device is not allowed to work")
        return [*ended, refusal, *self._scan_if_due()]

    def _on_resumed(self, _: Resumed) -> list[Instruction]:
        self.pause_reason, rested, self.declined_paused = "", self.declined_paused, False
        # The server skips clients that rest; a new inventory, which a scan announces as well, tells
        # it to ask again.
        if scan := self._scan_if_due():
            return scan
        return [Announce()] if rested and self.link is Link.READY else []

    # State (None: any) and event -> what handles it, and the states that it may change to.
    TABLE: ClassVar[dict[tuple[State | None, type], tuple[Handler, tuple[State, ...]]]] = {
        (None, LinkUp): (_on_link_up, (Link.GREETING,)),
        (None, LinkDown): (_on_link_down, (Link.OFFLINE,)),
        (Link.GREETING, Welcomed): (_on_welcomed, (Link.PREPARING, Link.ANNOUNCING, Work.IDLE)),
        (Link.GREETING, HelloRefused): (_on_hello_refused, ()),
        (Link.PREPARING, BackboneReady): (_on_backbone_ready, (Link.GREETING,)),
        (Link.PREPARING, BackboneFailed): (_on_backbone_failed, ()),
        (None, TryAgain): (_on_try_again, ()),
        (None, Scanned): (_on_scanned, ()),
        (None, ScanFailed): (_on_scan_failed, ()),
        (Link.ANNOUNCING, Announced): (_on_announced, (Link.READY,)),
        (Link.READY, Announced): (_on_announced_again, ()),
        (Link.ANNOUNCING, InventoryRefused): (_on_inventory_refused, (Link.READY,)),
        (Link.READY, InventoryRefused): (_on_inventory_refused, ()),
        (None, Paused): (_on_paused, ()),
        (None, Resumed): (_on_resumed, ()),
        (None, PauseTimeout): (_on_pause_timeout, (Work.IDLE,)),
        (None, FolderChanged): (_on_folder_changed, ()),
        (Work.IDLE, RoundOpened): (_on_round_opened, _BEGUN),
        (Work.FETCHING, RoundOpened): (_on_round_opened, _BEGUN),
        (Work.WORKING, RoundOpened): (_on_round_opened_while_working, _BEGUN),
        (Work.SENDING, RoundOpened): (_on_round_opened_while_sending, _BEGUN),
        (Work.FETCHING, PartsReady): (_on_parts_ready, (Work.WORKING,)),
        (Work.FETCHING, FetchFailed): (_on_failed, (Work.IDLE,)),
        (Work.WORKING, PartsLost): (_on_parts_lost, (Work.FETCHING, Work.IDLE)),
        (None, WorkDone): (_on_work_done, (Work.SENDING,)),
        (Work.WORKING, WorkFailed): (_on_failed, (Work.IDLE,)),
        (Work.SENDING, OfferFailed): (_on_offer_failed, (Work.IDLE,)),
        (None, Acked): (_on_acked, (Work.IDLE,)),
        (None, Nacked): (_on_nacked, (Work.IDLE,)),
        (Work.SENDING, RetryDue): (_on_retry_due, ()),
        (None, RoundOver): (_on_round_over, (Work.IDLE,)),
        (None, ModelOffered): (_on_model_offered, ()),
        (None, ModelFetched): (_on_model_fetched, ()),
        (None, ModelKept): (_on_model_kept, ()),
        (None, ModelFailed): (_on_model_failed, ()),
    }
