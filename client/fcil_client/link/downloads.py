"""Fetch the parts of a broadcast that are not on disk: verify, assemble, keep sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fcil_client.link.handshake import Terms
from fcil_client.link.object_downloads import ObjectDownloads, ObjectEnd
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    Header,
    open_body,
    parse_header,
    unwrap_key,
    verify_header,
)
from fcil_protocol.envelopes.header import chunk_bytes_for
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile, head_of
from fcil_protocol.envelopes.transfer import IncomingEnvelope, Receiver
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S, MIN_WINDOW_BYTES
from fcil_protocol.errors import CorruptFile, StaleUpdate, StorageError, TrustError, WireError
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import MAX_WANTED, Chunk, Message, PartRef, Parts, Want
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

IN_MEMORY_BYTES = 64 << 10  # larger parts are assembled in a file, and survive a restart
PARALLEL = 4  # parts transferred at once


@dataclass
class Downloads:
    """The parts of the current order that are still missing.

    Attributes:
        send: sends a message to the server.
        clock: seconds, never set back.
        refs: all parts of the order.
        waiting: those whose headers were not requested yet.
        heads: those whose headers were requested -> when.
        ahead: of those, bytes of first chunks requested with the header.
        receiver: those whose chunks are arriving.
        objects: those whose chunks come from the object store.
    """

    home: Home
    enrolment: Enrolment
    keys: PrivateKeys
    send: Callable[[Message], None]
    clock: Callable[[], float] = time.monotonic
    refs: dict[str, PartRef] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    heads: dict[str, float] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    receiver: Receiver = field(default_factory=lambda: Receiver(MIN_WINDOW_BYTES))
    objects: ObjectDownloads | None = None

    def start(self, parts: Sequence[PartRef], *, keep: Collection[str] = ()) -> bool:
        """Request the missing parts; True if none is missing. Transfers in progress continue.

        Args:
            parts: what the order or the offered model needs.
            keep: digests of other parts that stay on disk, complete or not.
        """
        self.refs = {p.digest: p for p in parts}
        for digest in list(self.receiver.under_way):
            if digest not in self.refs:
                self.receiver.end(digest)
        if self.objects is not None:
            self.objects.keep_only(self.refs)
        self.heads.clear()
        self.ahead.clear()
        self.waiting = [
            d for d in self.refs if d not in self._arriving and not self.home.part_path(d).exists()
        ]
        self._ask()
        self.home.prune_parts({*self.refs, *keep})  # while the answers are on their way
        return self._done

    def on_connection_lost(self) -> None:
        """Forget open requests: the connection is lost; `start` repeats them."""
        self.receiver.lose()
        self.heads.clear()
        self.ahead.clear()

    def revive(self) -> None:
        """Repeat requests without an answer on a live connection."""
        now = self.clock()
        for digest, asked in self.heads.items():
            if now - asked >= LOSS_TIMEOUT_S:
                self._ask_header(digest)
        if self.receiver.revive(now):
            self._ask()

    def stop(self) -> None:
        """Cancel all requests; received chunks of large parts stay on disk."""
        self.refs.clear()
        self.waiting.clear()
        self.heads.clear()
        self.ahead.clear()
        for digest in list(self.receiver.under_way):
            self.receiver.end(digest)
        if self.objects is not None:
            self.objects.keep_only(())

    @property
    def _arriving(self) -> dict[str, Assembly]:
        """The parts whose headers are here, and whose chunks are arriving."""
        found = {d: one.assembly for d, one in self.receiver.under_way.items()}
        return found if self.objects is None else found | self.objects.under_way

    @property
    def _done(self) -> bool:
        return not self.waiting and not self.heads and not self._arriving

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received and bytes in total of the current order's parts."""
        total = sum(p.sealed_bytes for p in self.refs.values())
        arriving = self._arriving
        open_ = (*self.waiting, *self.heads, *arriving)
        missing = sum(self.refs[d].sealed_bytes for d in open_)
        here = sum(assembly.received_bytes for assembly in arriving.values())
        return total - missing + here, total

    def _ask(self) -> None:
        while self.waiting and len(self.heads) + len(self._arriving) < PARALLEL:
            self._ask_header(self.waiting.pop(0))
        for want in self.receiver.wants(self.clock()):
            self.send(want)

    def _ask_header(self, digest: str) -> None:
        """Request a header, and as many first chunks as the window has room for.

        The sender's chunk size follows from the part's size, so this saves a round trip. Not behind
        a relay: chunks requested with a header come from the server, for each client. And not where
        the header may come with an address in an object store.
        """
        chunk_bytes = chunk_bytes_for(self.refs[digest].sealed_bytes)
        count = -(-self.refs[digest].sealed_bytes // chunk_bytes)
        self.ahead.pop(digest, None)
        free = self.receiver.pace.free_bytes - sum(self.ahead.values())
        room = min(free // chunk_bytes, MAX_WANTED)
        alone = self.enrolment.link_key or self.home.incoming_path(digest).exists()
        if self.objects is not None and self.objects.may_hold(self.refs[digest].sealed_bytes):
            alone = True
        chunks = [] if alone else list(range(max(0, min(count, room))))
        self.ahead[digest] = len(chunks) * chunk_bytes
        self.heads[digest] = self.clock()
        span = max(1, self.receiver.pace.span_bytes // chunk_bytes)
        self.send(Want(digest=digest, chunks=chunks, span=span, header=True))

    def header(self, received: Received, message: Parts, terms: Terms, server: PublicKeys) -> bool:
        """Take the signed header of a part and request its chunks.

        Returns:
            True if every part of the order is on disk now: an earlier process may have left all
            chunks of this one.

        Raises:
            WireError, TrustError: it is not the part that the order names, or not signed by the
                server.
            DiskFull, StorageError: it cannot be stored.
        """
        ref = self.refs.get(message.digest)
        if ref is None or message.digest not in self.heads:
            return False  # of a closed order, or a duplicate
        data, signature, wrap = received.blobs
        verify_header(data, signature, server)
        header = parse_header(data, max_plain_bytes=terms.max_payload_bytes)
        self._check(header, ref, terms)
        unwrap_key(wrap, data, self.keys)  # a wrap for another recipient fails here
        large = header.sealed_bytes > IN_MEMORY_BYTES
        path = self.home.incoming_path(message.digest) if large else None
        # The file is the part's final one from the beginning: once complete, it is only renamed.
        head = head_of(data, signature, wrap, header.sealed_bytes)
        assembly = Assembly(header, path=path, head=head)
        del self.heads[message.digest]
        self.receiver.pace.most_bytes = terms.credit
        ahead = self.ahead.pop(message.digest, 0) // chunk_bytes_for(ref.sealed_bytes)
        elsewhere = self.objects is not None and self.objects.usable(message.url)
        if self.objects is not None and elsewhere and not ahead and not assembly.complete:
            self.objects.begin(message.url, received.blobs, assembly)
            self._ask()
            return False
        return self._over_the_link(received.blobs, assembly, ahead)

    def _over_the_link(self, blobs: Sequence[bytes], assembly: Assembly, ahead: int = 0) -> bool:
        begun = self.receiver.begin(blobs, assembly, self.clock(), unasked=ahead)
        return self._continue(begun)

    def object_ended(self, end: ObjectEnd) -> bool:
        """Take a part that the object store has given; ask the server for one that it has not.

        Returns:
            True if every part of the order is on disk now.

        Raises:
            DiskFull, StorageError: a complete part cannot be stored.
        """
        return self._over_the_link(end.blobs, end.assembly)

    def _check(self, header: Header, ref: PartRef, terms: Terms) -> None:
        core = header.core
        expected = (self.enrolment.federation, terms.run, "broadcast", "server", ref.name)
        got = (core.federation, core.run, core.direction, core.sender, core.part)
        if header.update_id != ref.digest or got != expected:
            raise WireError(f"part {ref.name!r}: expected {expected}, got {got}.")

    def chunk(self, received: Received, message: Chunk) -> bool:
        """Take the chunks of a message; True once every part of the order is on disk.

        Raises:
            WireError: it does not fit the header; it is discarded.
            DiskFull, StorageError: the chunk, or the complete part, cannot be written.
        """
        data = received.blobs[0]
        try:
            envelope = self.receiver.put(message.digest, message.index, data, self.clock())
        except WireError:
            self._ask()
            raise
        if envelope is None:
            return False
        return self._continue(envelope)

    def _continue(self, envelope: IncomingEnvelope) -> bool:
        if envelope.complete:
            envelope.assembly.finish(self.home.part_path(envelope.digest))
            self.receiver.end(envelope.digest)
        self._ask()
        return self._done


def open_part(home: Home, ref: PartRef, keys: PrivateKeys, server: PublicKeys) -> Payload:
    """Open one stored part; a damaged one is removed, so that it is fetched again.

    Raises:
        StaleUpdate: the stored file was damaged or is gone; the round must fetch again.
        StorageError: the system cannot read it now; its content may be intact.
    """
    path = home.part_path(ref.digest)
    try:
        with EnvelopeFile(path) as stored:
            verify_header(stored.header, stored.signature, server)
            header = stored.parsed
            if header.update_id != ref.digest:
                raise CorruptFile(f"{path} holds another part than its name says.")
            key = unwrap_key(stored.wrap, stored.header, keys)
            # The cipher detects the damage that the chunks' hashes would: each byte is read once.
            return unpack(open_body(header, key, stored.steps()))
    except (CorruptFile, TrustError, WireError) as error:
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)
        raise StaleUpdate(f"part {ref.name!r} was damaged on disk ({error}).") from error
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise StaleUpdate(f"part {ref.name!r} is no longer on disk.") from error
