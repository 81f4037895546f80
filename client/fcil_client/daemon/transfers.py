"""Transfer of envelopes: parts in, updates and inventories out. Each transfer ends in an event."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fcil_client.data.inventory import Inventory
from fcil_client.link.connection import Connection
from fcil_client.link.downloads import Downloads
from fcil_client.link.handshake import Terms
from fcil_client.link.object_downloads import ObjectDownloads, ObjectEnd, is_local
from fcil_client.notes import Notes
from fcil_client.rounds.round_work import RoundWork
from fcil_client.session import events
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.outbox import Outbox
from fcil_client.state.sent_journal import SentJournal
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S
from fcil_protocol.errors import (
    CorruptFile,
    FcilError,
    NotYet,
    RoundClosed,
    StorageError,
    from_code,
)
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import (
    Chunk,
    Fetched,
    Nack,
    PartRef,
    Parts,
    Pull,
    RoundOpen,
    UseModel,
    Want,
)
from fcil_protocol.trust.keys import PrivateKeys

RECENT = 8  # number of inventories, and of offers, whose late answers this process recognises
WATCH_S = 10.0  # interval of checks for losses on a live connection


class Transfers:
    """Moves envelopes over the connection, for the session.

    Args:
        journal: records each envelope before it leaves.
        feed: takes an event.
        outbox: store of updates.
        link_only: no part is fetched from the server's object store.
        advanced: called when parts from there have come nearer to their ends.
        spawn: starts a task; what escapes from it ends the client.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        keys: PrivateKeys,
        line: Connection,
        journal: SentJournal,
        notes: Notes,
        feed: Callable[[events.Event], None],
        outbox: Outbox,
        *,
        link_only: bool = False,
        advanced: Callable[[], None] = lambda: None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = asyncio.create_task,
    ) -> None:
        self._home = home
        self._line = line
        self._journal = journal
        self._notes = notes
        self._feed = feed
        self._outbox = outbox
        self._downloads = Downloads(home, enrolment, keys, line.send)
        self._link_only = link_only
        self._advanced = advanced
        self._spawn = spawn
        self._unreported: dict[str, int] = {}  # digest -> bytes that came from the object store
        self._fetched: events.PartsReady | events.ModelFetched | None = None  # fed at the end
        self._of_order: set[str] = (
            set()
        )  # digests of parts: rounds leave the offered model's on disk
        self._of_model: set[str] = set()
        self._inventories: deque[str] = deque(maxlen=RECENT)  # digests, the newest last
        self._offered: deque[str] = deque(maxlen=RECENT)  # digests without an answer
        self._begun: deque[str] = deque(maxlen=RECENT)  # digests; the server may have chunks
        self._heard: dict[str, float] = {}  # digest -> time of its last message
        self._last: tuple[object, str, StoredEnvelope] | None = None  # inventory: its content
        self._waits = False  # the round's updates send no chunk before it is requested

    def waiting(self) -> tuple[RoundOpen | None, str]:
        """Return the order and digest of the update that an earlier process left in the outbox."""
        order, digest = self._outbox.waiting()
        if digest and not self._journal.has_sealed(digest):
            # A power cut took the journal line, so it never left; the server requests another one.
            self._home.drop_outgoing(digest)
            return None, ""
        if digest:
            self._begun.append(digest)
        return order, digest

    def on_connection_lost(self) -> None:
        """Discard the state of transfers: the connection is lost."""
        self._heard.clear()
        self._downloads.on_connection_lost()

    async def watch(self) -> None:
        """Retry transfers that were lost on a live connection."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._downloads.revive()
            for digest, heard in list(self._heard.items()):
                if time.monotonic() - heard >= LOSS_TIMEOUT_S:
                    self._say_again(digest)

    def _say_again(self, digest: str) -> None:
        """Offer an unanswered envelope again, unless it was dropped meanwhile."""
        if not self._held(digest):
            del self._heard[digest]
            return
        self._heard[digest] = time.monotonic()
        try:
            self._send(digest)
        except FcilError as error:
            self._unsent(digest, error)

    def _held(self, digest: str) -> bool:
        return self._home.outbox_path(digest).exists() or digest in self._newest

    # --- in ---------------------------------------------------------------------------------

    def fetch(self, order: RoundOpen) -> None:
        """Request the parts of an order that are not on disk."""
        self._of_order = {part.digest for part in order.parts}
        self._waits = order.ask_first
        self._start(order.parts, events.PartsReady(order.key))

    def fetch_model(self, model: UseModel) -> None:
        """Request the parts of an offered model that are not on disk."""
        self._of_model = {part.digest for part in model.parts}
        self._start(model.parts, events.ModelFetched(model))

    def _start(
        self, parts: Sequence[PartRef], fetched: events.PartsReady | events.ModelFetched
    ) -> None:
        self._fetched = fetched
        try:
            complete = self._downloads.start(parts, keep=self._of_order | self._of_model)
        except StorageError as error:
            self._unfetched(error)
        else:
            if complete:
                self._feed(fetched)

    def stop(self) -> None:
        """Stop requesting parts."""
        self._downloads.stop()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received and bytes in total of the order's parts."""
        return self._downloads.progress

    def part(self, received: Received, message: Parts | Chunk, terms: Terms) -> None:
        """Take a part's header or chunk.

        Raises:
            WireError: the chunk does not fit; others may still arrive.
        """
        try:
            if isinstance(message, Chunk):
                complete = self._downloads.chunk(received, message)
            else:
                complete = self._downloads.header(received, message, terms, self._line.server)
        except FcilError as error:
            if isinstance(message, Chunk) and not isinstance(error, StorageError):
                raise
            self._unfetched(error)
        else:
            if complete and self._fetched is not None:
                self._feed(self._fetched)

    # --- in, from the object store ------------------------------------------------------------

    def use_object_store(self, base: str) -> None:
        """Use the object store that a Welcome names, or none; called with each Welcome."""
        downloads = self._downloads
        downloads.on_connection_lost()  # what was requested since then never left
        self._report_fetched()
        used = downloads.objects
        if used is not None and used.base != base:
            used.keep_only(())
            downloads.objects = used = None
        readable = base.isascii() and base.isprintable()  # the owner reads it
        if not base or not readable or self._link_only or downloads.enrolment.link_key:
            return
        # Without TLS only if the server is on this very machine: else a server could let devices
        # ask whatever answers to plain HTTP near them.
        local = is_local(self._line.address)
        if used is not None:
            used.plain_http = local
            return
        downloads.objects = ObjectDownloads(
            base, plain_http=local, arrived=self._advanced, ended=self._from_object_store,
            came=self._came, spawn=self._spawn,
        )  # fmt: skip
        self._notes("info", f"large parts of broadcasts come from {base} (--link-only: not)")

    async def close(self) -> None:
        """Stop fetching from the object store, and report what came."""
        if self._downloads.objects is not None:
            await self._downloads.objects.close()

    def _came(self, digest: str, size: int) -> None:
        self._unreported[digest] = self._unreported.get(digest, 0) + size
        self._report_fetched()

    def _report_fetched(self) -> None:
        """Tell the server what came from elsewhere, which it cannot count."""
        if self._line.is_open:
            for digest, size in self._unreported.items():
                self._line.send(Fetched(digest=digest, size=size))
            self._unreported.clear()

    def _from_object_store(self, end: ObjectEnd) -> None:
        if isinstance(end.error, StorageError):
            self._unfetched(end.error)
            return
        if end.error is not None:
            self._notes("warning", f"the object store does not give a part ({end.error.message}) "
                        "The server sends it")  # fmt: skip
        try:
            complete = self._downloads.object_ended(end)
        except FcilError as error:
            self._unfetched(error)
        else:
            if complete and self._fetched is not None:
                self._feed(self._fetched)

    def _unfetched(self, error: FcilError) -> None:
        self._downloads.stop()
        text = f"a part cannot be fetched: {error}"
        match self._fetched:
            case events.PartsReady(key):
                self._feed(events.FetchFailed(key, error.code, text))
            case events.ModelFetched(model):
                self._notes("warning", f"the offered model: {text}")
                self._feed(events.ModelFailed(model))

    # --- out --------------------------------------------------------------------------------

    def announce(self, work: RoundWork, inventory: Inventory, terms: Terms) -> None:
        """Seal the list of classes and send it."""
        try:
            digest = self._inventory(work, inventory, terms)
            if digest not in self._heard:  # else it was sent over this connection
                self._journal.sent(digest)
                self._hand_over(digest)
        except FcilError as error:
            self._notes("error", f"the classes cannot be announced: {error}")
            self._feed(events.InventoryRefused(error.code))

    def _inventory(self, work: RoundWork, inventory: Inventory, terms: Terms) -> str:
        """Return the sealed inventory's digest; an unchanged one keeps its digest and progress."""
        told = inventory.announceable(work.least(terms)).counts()
        what = (told, terms.run, terms.method.name, terms.schema_digest, self._line.server)
        if self._last is None or self._last[0] != what:
            sealed, digest = work.seal_inventory(terms, self._line.server, inventory)
            self._last = (what, digest, sealed)
            self._inventories.append(digest)
        self._outbox.keep_for_session(self._last[1], self._last[2])
        return self._last[1]

    def offer(self, digest: str) -> None:
        """Send an update from the outbox (again).

        One that is damaged or gone is given up; one that cannot be read now is offered again later.
        """
        if digest in self._heard:
            return  # already sent over this connection
        try:
            self._outbox.load(digest)
        except StorageError as error:
            if isinstance(error, CorruptFile) or self._home.outbox_path(digest).exists():
                self._unsent(digest, error)
            else:
                self._feed(events.OfferFailed(digest, error.code, str(error)))
            return
        try:
            self._journal.sent(digest)
        except FcilError as error:  # what the journal does not list does not leave
            self._feed(events.OfferFailed(digest, error.code, str(error)))
            return
        try:
            self._hand_over(digest)
        except FcilError as error:
            self._unsent(digest, error)

    def _hand_over(self, digest: str) -> None:
        if digest not in self._offered:
            self._offered.append(digest)
        self._heard[digest] = time.monotonic()
        self._send(digest)

    def _send(self, digest: str) -> None:
        again = digest in self._begun
        if not again:
            self._begun.append(digest)
        waits = self._waits and digest not in self._inventories
        self._outbox.offer(digest, self._line.send, again=again, waits=waits)

    def send_requested(self, message: Want | Pull) -> None:
        """Send the requested chunks, if the envelope was offered and is still held."""
        digest = message.digest
        if digest not in self._offered:
            return
        if self._held(digest):
            self._heard[digest] = time.monotonic()
            try:
                self._outbox.send_chunks(digest, message.chunks, self._line.send, span=message.span)
            except FcilError as error:
                self._unsent(digest, error)

    @property
    def _newest(self) -> list[str]:
        return list(self._inventories)[-1:]

    def _unsent(self, digest: str, error: FcilError) -> None:
        """Give up a damaged envelope; offer it again later after any other failure.

        `offer`, which then reopens the file, decides.
        """
        if isinstance(error, CorruptFile):
            self._unreadable(digest, error)
            return
        self._heard.pop(digest, None)  # otherwise `offer` would treat it as sent
        self._notes("warning", str(error))
        self._feed(events.Nacked(digest, error.code))

    def _unreadable(self, digest: str, error: FcilError) -> None:
        """Give up an update whose file is damaged; the server requests another one."""
        self._notes("warning", str(error))
        self._feed(events.Nacked(digest, "corrupt_file"))

    def acked(self, digest: str) -> None:
        """Handle the server's Ack of an envelope."""
        waited = self._answered(digest, lambda: self._journal.acked(digest))
        if digest in self._inventories:
            self._feed(events.Announced())
            return
        if waited:
            self._notes("info", "the server has the update")
        self._feed(events.Acked(digest))

    def on_nack(self, nack: Nack) -> None:
        """Handle a Nack: the server refuses an envelope, or lacks a requested part."""
        error = from_code(nack.code, nack.text, nack.action)
        self._answered(nack.digest, lambda: self._journal.refused(nack.digest, nack.code))
        if nack.digest in self._downloads.refs:
            self._unfetched(error)
        elif nack.digest not in self._inventories:
            level = "info" if isinstance(error, RoundClosed | NotYet) else "warning"
            did = (
                "does not take the update yet"
                if isinstance(error, NotYet)
                else "refused the update"
            )
            self._notes(level, f"the server {did}: {error}")
            self._feed(events.Nacked(nack.digest, nack.code))
        elif nack.digest in self._newest:
            self._notes("error", f"the server refused the list of classes: {error}")
            self._feed(events.InventoryRefused(nack.code))

    def _answered(self, digest: str, write: Callable[[], None]) -> bool:
        """Record the answer to an offer, once; the server cannot make this device write more.

        Returns:
            True if the offer waited for it.
        """
        self._heard.pop(digest, None)
        self._outbox.forget(digest)
        if digest not in self._offered:
            return False
        self._offered.remove(digest)
        try:
            write()
        except StorageError as error:  # it did leave, and the journal says so
            self._notes("warning", str(error))
        return True
