"""Outgoing updates: sealed once, on disk before the first chunk, until the Ack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fcil_client.state.home import Home
from fcil_protocol.envelopes.envelope import write_envelope
from fcil_protocol.envelopes.header import Core
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile, StoredEnvelope
from fcil_protocol.envelopes.transfer import UNASKED_SPAN_BYTES, Sender, unrequested_chunks
from fcil_protocol.errors import CorruptFile, StorageError, WireError
from fcil_protocol.messages.messages import RoundOpen, Update
from fcil_protocol.payloads.payload import Payload

Send = Callable[..., None]


class Outbox:
    """A client's outgoing envelopes; small ones of the session stay in memory."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._held: dict[str, StoredEnvelope] = {}
        self._for_relay = ("", b"")  # digest of an update -> its key, wrapped for a relay
        self._own: set[str] = set()  # written by this process: its bytes need no verification
        self._open: tuple[str, EnvelopeFile] | None = None
        self._span_bytes = UNASKED_SPAN_BYTES  # of a message, as last requested by the server

    def waiting(self) -> tuple[RoundOpen | None, str]:
        """Return the order and digest of the newest update that was not acknowledged.

        The order has only the fields that the update itself names: its round and base. Older
        updates, and damaged ones, are dropped: their rounds are over or will be requested again.
        The states that came with them stay until the next round: the server may have an update that
        is half removed here, and its verdict arrives.

        Raises:
            StorageError: an update cannot be read now; it stays.
        """
        self._home.drop_notes()
        found: tuple[RoundOpen | None, str] = (None, "")
        by_age = sorted(
            self._home.outbox(), key=lambda d: self._home.outbox_path(d).stat().st_mtime
        )
        for digest in by_age:
            try:
                order = self._order(digest)
            except (CorruptFile, WireError, ValueError):
                self._home.drop_outgoing(digest)
                continue
            older = digest
            # By base state: a file's time says little after a jump of the clock.
            if found[0] is None or order.base >= found[0].base:
                found, older = (order, digest), found[1]
            if older:
                self._home.drop_outgoing(older)
        return found

    def _order(self, digest: str) -> RoundOpen:
        with EnvelopeFile(self._home.outbox_path(digest)) as file:
            if file.parsed.update_id != digest:
                raise CorruptFile("an update in the outbox has another one's name.")
            file.verify()
            return _order_of(file.parsed.core)

    def put(self, digest: str, envelope: StoredEnvelope) -> None:
        """Store a sealed update; it is on disk when this returns.

        Raises:
            DiskFull, StorageError: nothing of it was kept.
        """
        try:
            write_envelope(self._home.outbox_path(digest), envelope)
        except StorageError:
            self._home.drop_outgoing(digest)
            raise
        self._own = {digest}

    def share(self, digest: str, wrap: bytes) -> None:
        """Offer an update with its content key wrapped for a relay too, in this process."""
        self._for_relay = (digest, wrap)

    def forget(self, digest: str) -> None:
        """Close the file of an envelope that is not sent any more."""
        if self._open is not None and self._open[0] == digest:
            self._open[1].close()
            self._open = None

    def keep_for_session(self, digest: str, envelope: StoredEnvelope) -> None:
        """Keep an envelope for this session only (an inventory is sealed afresh each time)."""
        self._held = {digest: envelope}

    def load(self, digest: str) -> None:
        """Open an envelope, so that `offer` does not access the disk.

        Raises:
            CorruptFile, StorageError: the file in the outbox is damaged or gone.
        """
        self._envelope(digest)

    def offer(self, digest: str, send: Send, *, again: bool, waits: bool = False) -> None:
        """Send an envelope's header, and its first chunks if the server has none of it.

        Args:
            digest: the envelope.
            send: sends a message.
            again: the server may have some chunks and requests the rest, unless there is only one.
            waits: the server requests all chunks.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope = self._envelope(digest)
        header = envelope.parsed
        requested = waits or (again and len(header.hashes) > 1)
        count = 0 if requested else unrequested_chunks(header)
        message = Update(digest=digest, unasked=count)
        shared, wrap = self._for_relay
        also = (wrap,) if shared == digest else ()
        send(message, envelope.header, envelope.signature, envelope.wrap, *also)
        span = max(1, self._span_bytes // header.chunk_bytes)
        self.send_chunks(digest, range(count), send, span=span)

    def send_chunks(self, digest: str, indices: Sequence[int], send: Send, *, span: int) -> None:
        """Send the requested chunks, at most ``span`` in a message.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope = self._envelope(digest)
        self._span_bytes = span * envelope.parsed.chunk_bytes
        there = (i for i in indices if 0 <= i < len(envelope.parsed.hashes))
        for message, data in Sender(envelope.parsed, envelope.read).messages(there, span):
            send(message, data)

    def _envelope(self, digest: str) -> StoredEnvelope | EnvelopeFile:
        if digest in self._held:
            return self._held[digest]
        if self._open is None or self._open[0] != digest:
            file = EnvelopeFile(self._home.outbox_path(digest))
            try:
                if digest not in self._own:
                    file.verify()
            except BaseException:
                file.close()
                raise
            if self._open is not None:
                self._open[1].close()
            self._open = (digest, file)
        return self._open[1]


def _order_of(core: Core) -> RoundOpen:
    """Return the order that an update answers, as far as its header names it: round and state."""
    return RoundOpen(
        run=core.run, task=core.task, kind=core.kind, round=core.round, rounds=0, base=core.base,
        classes=[], past=[], seed=[], remaining_s=0.0, parts=[],
    )  # fmt: skip


class Keeping:
    """Writes updates, and the states that came with them, one at a time."""

    def __init__(self, home: Home, outbox: Outbox) -> None:
        self._home = home
        self._outbox = outbox
        self._turn = asyncio.Lock()

    async def keep(self, digest: str, envelope: StoredEnvelope, state: Payload | None) -> None:
        """Store an update; if the round is stopped meanwhile, nothing of it stays.

        A thread cannot be stopped: the next one waits for its end.

        Raises:
            DiskFull, StorageError: nothing of it was kept.
        """
        async with self._turn:
            keep = asyncio.to_thread(self._write, digest, envelope, state)
            writing = asyncio.ensure_future(keep)
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait({writing})
                if writing.exception() is None:
                    await asyncio.to_thread(self._remove, digest)
                raise

    def _write(self, digest: str, envelope: StoredEnvelope, state: Payload | None) -> None:
        # All earlier updates have their verdict: this round could not have begun otherwise.
        self._home.prune_provisional(set(self._home.outbox()))
        try:
            if state is not None:
                self._home.save_provisional(digest, state)
            self._outbox.put(digest, envelope)
        except StorageError:
            self._home.settle_provisional(digest, counted=False)
            raise

    def _remove(self, digest: str) -> None:
        self._home.drop_outgoing(digest)
        self._home.settle_provisional(digest, counted=False)
