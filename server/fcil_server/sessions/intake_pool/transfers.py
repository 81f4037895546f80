"""Transfers of a round in an intake process: small parts to its clients, small updates from them.

It gives clients the parts of the round's broadcast, and receives updates of the round to their last
chunk; then the server opens and counts them. Every other message passes to the server unchanged,
also each that breaks a rule: the server answers it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    ContentKey,
    Header,
    parse_header,
    verify_header,
    wrap_key,
)
from fcil_protocol.envelopes.transfer import (
    IncomingEnvelope,
    Receiver,
    Sender,
    granted,
    unrequested_chunks,
)
from fcil_protocol.envelopes.window import MIN_WINDOW_BYTES, share
from fcil_protocol.errors import FcilError, WireError
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.interface import SharedFrame, wire_bytes
from fcil_protocol.messages.frames import Received, numbered, parse
from fcil_protocol.messages.messages import Chunk, Hello, Message, Parts, Update, Want
from fcil_protocol.messages.relay_frames import is_laned
from fcil_protocol.messages.signed_session import HandedSession
from fcil_protocol.trust.keys import PublicKeys

UPDATE_BYTES = 1 << 20  # larger updates pass: the server resumes them after a lost connection
PART_BYTES = 4 << 20  # larger parts pass
MEMORY_BYTES = 128 << 20  # of updates that are arriving; then others pass
REVIVE_S = 5.0  # between looks for chunks that never came

CONTROL, UPDATE = "control", "update"  # causes of messages; that of a part's is its digest

Frames = Sequence[bytes]
# Connection, cause, whether it was sent; messages with a part's header; sealed, application and
# wire bytes.
Flow = tuple[int, str, bool, int, int, int, int]


@dataclass(frozen=True)
class SmallPart:
    """A part of the round's broadcast, with the key that is wrapped for each client."""

    header: Header
    header_bytes: bytes
    signature: bytes
    key: ContentKey
    body: bytes = field(repr=False)


@dataclass
class _Bytes:
    """Messages of one connection and one cause, as the server's byte meter counts them."""

    count: int = 0
    sealed: int = 0
    application: int = 0
    wire: int = 0

    def add(self, frames: Frames, *, sealed: int = 0, count: int = 0) -> None:
        """Add a message."""
        self.count += count
        self.sealed += sealed
        self.application += sum(map(len, frames))
        self.wire += wire_bytes(frames)


@dataclass(eq=False)
class HeldSession:
    """A client's session in this process.

    Attributes:
        updates: digest -> header, signature and wrap of those that are arriving.
        handed: digest of the newest update that the server has got.
    """

    conn: int
    session: HandedSession
    keys: PublicKeys = field(repr=False)
    receiver: Receiver = field(default_factory=lambda: Receiver(MIN_WINDOW_BYTES), repr=False)
    updates: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    handed: str = ""


class RoundTransfers:
    """The sessions whose transfers this process does.

    Args:
        credit: bytes of one client that may be requested and not yet received.
        send: sends a message over a connection; False if its client does not read.
        arrived: takes an update with all its chunks: connection, digest, blobs, chunks.
        faulty: takes the error of an update's chunk: connection, digest, error.
    """

    def __init__(
        self,
        *,
        credit: int,
        send: Callable[[int, Frames], bool],
        arrived: Callable[[int, str, Frames, Frames], None],
        faulty: Callable[[int, str, FcilError], None],
    ) -> None:
        self._credit = credit
        self._send = send
        self._arrived = arrived
        self._faulty = faulty
        self._clients: dict[int, HeldSession] = {}
        self._receiving: weakref.WeakSet[Receiver] = weakref.WeakSet()
        self._arriving_bytes = 0
        self._round: RoundKey | None = None
        self._parts: dict[str, SmallPart] = {}
        self._shared: dict[tuple[str, range], SharedFrame] = {}
        self._flows: dict[tuple[int, str, bool], _Bytes] = defaultdict(_Bytes)

    # --- sessions ---------------------------------------------------------------------------

    def begin(self, conn: int, session: HandedSession, keys: PublicKeys) -> None:
        """Take over the session of a connection."""
        self.end(conn)
        self._clients[conn] = HeldSession(conn, session, keys)

    def end(self, conn: int) -> None:
        """Forget the session of a connection; what came of its updates is lost."""
        client = self._clients.pop(conn, None)
        if client is not None:
            for digest in list(client.receiver.under_way):
                self._forget(client, digest)

    def open_round(self, key: RoundKey, parts: dict[str, SmallPart]) -> None:
        """Note the round whose updates are received here, and the parts that clients may fetch."""
        self._round, self._parts = key, parts
        self._shared.clear()

    def stamp(self, conn: int, frames: Frames) -> Frames | None:
        """Return a message of the server as it leaves; None: its session is over.

        A chunk has neither number nor MAC, so it needs no session.
        """
        if len(frames) < 2 or frames[1] or is_laned(frames):
            return frames  # signed by the server itself, or a relay's
        client = self._clients.get(conn)
        if client is None:
            return frames if numbered(frames[0], 0) is None else None
        stamped = client.session.stamp(frames)
        flow = self._flows[conn, CONTROL, True]  # what the server could not count
        flow.application += sum(map(len, stamped)) - sum(map(len, frames))
        flow.wire += wire_bytes(stamped) - wire_bytes(frames)
        return stamped

    def take_flows(self) -> list[Flow]:
        """Return what was sent and received here since the last call."""
        flows, self._flows = self._flows, defaultdict(_Bytes)
        return [(*of, f.count, f.sealed, f.application, f.wire) for of, f in flows.items()]

    # --- messages of clients ----------------------------------------------------------------

    def take(self, conn: int, frames: Frames) -> bool:
        """Do what a client's message asks for; False: it is for the server."""
        client = self._clients.get(conn)
        if client is None:
            return False
        try:
            received = parse(frames, to_server=True)
            match received.message:
                case Hello():
                    self.end(conn)
                    return False
                case Want() as message:
                    return self._serve(client, received, message)
                case Update() as message:
                    return self._begin(client, received, message)
                case Chunk() as message:
                    return self._chunk(client, received, message)
        except FcilError:
            pass  # the server says what is wrong with it
        return False

    def _say(
        self, client: HeldSession, message: Message, *blobs: bytes, about: str = CONTROL
    ) -> bool:
        frames = client.session.frames(message, *blobs)
        if not self._send(client.conn, frames):
            return False
        sealed = len(blobs[0]) if isinstance(message, Chunk) else 0
        count = isinstance(message, Parts)
        self._flows[client.conn, about, True].add(frames, sealed=sealed, count=count)
        return True

    # --- down: parts ------------------------------------------------------------------------

    def _serve(self, client: HeldSession, received: Received, want: Want) -> bool:
        part = self._parts.get(want.digest)
        if part is None or (want.chunks and max(want.chunks) >= len(part.header.hashes)):
            return False
        client.session.check(received)
        self._flows[client.conn, CONTROL, False].add((received.body, received.signature))
        if want.header:
            wrap = wrap_key(part.key, part.header_bytes, client.keys)
            head = Parts(digest=want.digest)
            blobs = (part.header_bytes, part.signature, wrap)
            if not self._say(client, head, *blobs, about=want.digest):
                return True
        chunks = granted(part.header, want.chunks, self._credit)
        sender = Sender(part.header, partial(self._share, part))
        for message, data in sender.messages(chunks, want.span):
            if not self._say(client, message, data, about=want.digest):
                break  # the client asks again for missing chunks
        return True

    def _share(self, part: SmallPart, run: range) -> SharedFrame:
        """Return consecutive chunks of a part, the same bytes for all clients."""
        name = (part.header.update_id, run)
        if name not in self._shared:
            self._shared[name] = SharedFrame(part.body[part.header.extent(run)])
        return self._shared[name]

    # --- up: updates ------------------------------------------------------------------------

    def _begin(self, client: HeldSession, received: Received, message: Update) -> bool:
        if message.digest in client.receiver.under_way:
            self._count_up(client, received)
            client.session.check(received)
            self._ask(client)
            return True
        if len(received.blobs) != 3 or message.digest == client.handed:
            return False
        data, signature, _ = received.blobs
        header = parse_header(data, max_plain_bytes=UPDATE_BYTES)
        core = header.core
        key = (core.run, core.task, core.kind, core.round)
        fits = key == self._round and header.update_id == message.digest
        if not fits or self._arriving_bytes + header.sealed_bytes > MEMORY_BYTES:
            return False
        verify_header(data, signature, client.keys)
        client.session.check(received)
        self._count_up(client, received)
        for digest in list(client.receiver.under_way):
            self._forget(client, digest)  # a client sends one update at a time
        self._arriving_bytes += header.sealed_bytes
        self._receiving.add(client.receiver)
        client.updates[message.digest] = received.blobs
        coming = min(message.unasked, unrequested_chunks(header))
        envelope = client.receiver.begin(
            received.blobs, Assembly(header, path=None), _now(), unasked=coming
        )
        self._continue(client, envelope)
        return True

    def _chunk(self, client: HeldSession, received: Received, message: Chunk) -> bool:
        envelope = client.receiver.under_way.get(message.digest)
        if envelope is None:
            return False
        self._count_up(client, received, sealed=len(received.blobs[0]))
        try:
            client.receiver.put(message.digest, message.index, received.blobs[0], _now())
        except WireError as error:
            if not envelope.retries:
                self._forget(client, message.digest)
            self._faulty(client.conn, "" if envelope.retries else message.digest, error)
        self._continue(client, envelope)
        return True

    def _count_up(self, client: HeldSession, received: Received, *, sealed: int = 0) -> None:
        frames = (received.body, received.signature, *received.blobs)
        self._flows[client.conn, UPDATE, False].add(frames, sealed=sealed)

    def _continue(self, client: HeldSession, envelope: IncomingEnvelope) -> None:
        if not envelope.complete:
            self._ask(client)
            return
        chunks = list(envelope.assembly.chunks())
        blobs = client.updates[envelope.digest]
        self._forget(client, envelope.digest)
        client.handed = envelope.digest
        self._arrived(client.conn, envelope.digest, blobs, chunks)

    def _ask(self, client: HeldSession) -> None:
        client.receiver.pace.most_bytes = share(self._credit, len(self._receiving))
        for want in client.receiver.wants(_now()):
            self._say(client, want)

    def _forget(self, client: HeldSession, digest: str) -> None:
        envelope = client.receiver.end(digest)
        client.updates.pop(digest, None)
        if envelope is not None:
            self._arriving_bytes -= envelope.header.sealed_bytes
        if not client.receiver.under_way:
            self._receiving.discard(client.receiver)

    def revive(self) -> None:
        """Ask again for requested chunks that never came over a live connection."""
        now = _now()
        for client in list(self._clients.values()):
            if client.receiver.under_way and client.receiver.revive(now):
                self._ask(client)


def _now() -> float:
    return asyncio.get_running_loop().time()
