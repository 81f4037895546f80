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
from typing import NamedTuple

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    WRAP_BYTES,
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
from fcil_protocol.envelopes.window import ASKED_BYTES, MIN_WINDOW_BYTES, share
from fcil_protocol.errors import FcilError, WireError
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.link.interface import SharedFrame, SharedFrames, wire_bytes
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import Chunk, Hello, Message, Parts, Update, Want
from fcil_protocol.messages.relay_frames import is_laned
from fcil_protocol.messages.signed_session import TAG_BYTES, HandedSession
from fcil_protocol.process.defects import keep_details
from fcil_protocol.trust.keys import PublicKeys

UPDATE_BYTES = 1 << 20  # larger updates pass: the server resumes them after a lost connection
PART_BYTES = 4 << 20  # larger parts pass
# Of updates that are arriving at all processes of a server; then others wait, or pass if their
# first chunks are on their way.
MEMORY_BYTES = 128 << 20
SHARED_BYTES = 16 << 20  # of chunks of parts, sent last
IDLE_S = 5.0  # without data: then the next in line need not wait for this update
REVIVE_S = 5.0  # between looks for chunks that never came

CONTROL, UPDATE = "control", "update"  # causes of messages; that of a part's is its digest

Frames = Sequence[bytes]


class Flow(NamedTuple):
    """Messages of one connection and one cause since the last report.

    Attributes:
        about: `CONTROL`, `UPDATE`, or the digest of a part.
        sent: to the client; False: by it.
        parts: those with a part's header.
        sealed, application, wire: bytes, as the server's byte meter counts them.
    """

    conn: int
    about: str
    sent: bool
    parts: int
    sealed: int
    application: int
    wire: int


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

    parts: int = 0
    sealed: int = 0
    application: int = 0
    wire: int = 0

    def add(self, frames: Frames, *, sealed: int = 0, parts: int = 0) -> None:
        """Add a message."""
        self.parts += parts
        self.sealed += sealed
        self.application += sum(map(len, frames))
        self.wire += wire_bytes(frames)


@dataclass(frozen=True)
class _Offer:
    """An update that a client has, and whose header was verified.

    Attributes:
        blobs: header, signature and wrap as received.
    """

    header: Header
    blobs: tuple[bytes, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes of memory that it takes once it has arrived."""
        return self.header.sealed_bytes + sum(map(len, self.blobs))


@dataclass(eq=False)
class ClientTransfers:
    """A client's session in this process.

    Attributes:
        updates: those that are arriving, by digest.
        left: digest of an update that is left to the server, which has it or resumes it.
        over: the client has sent another Hello, and the server takes all its messages.
    """

    conn: int
    session: HandedSession
    keys: PublicKeys = field(repr=False)
    receiver: Receiver = field(default_factory=lambda: Receiver(MIN_WINDOW_BYTES), repr=False)
    updates: dict[str, _Offer] = field(default_factory=dict, repr=False)
    left: str = ""
    over: bool = False


class RoundTransfers:
    """The sessions whose transfers this process does.

    Args:
        credit: bytes of one client that may be requested and not yet received.
        processes: how many share the memory for transfers.
        send: sends a message over a connection; False if its client does not read.
        begun: receives connection and digest of an update whose chunks are requested here.
        arrived: takes an update with all its chunks: connection, digest, blobs, chunks.
        lost: takes what came of an update that is given up here: the same, with the chunks by
            index, and True if its connection goes on.
        faulty: takes the error of an update's chunk: connection, digest, error.
    """

    def __init__(
        self,
        *,
        credit: int,
        processes: int,
        send: Callable[[int, Frames], bool],
        begun: Callable[[int, str], None],
        arrived: Callable[[int, str, Frames, Frames], None],
        lost: Callable[[int, str, Frames, dict[int, bytes], bool], None],
        faulty: Callable[[int, str, FcilError], None],
    ) -> None:
        self._credit = credit
        self._processes = processes
        self._send = send
        self._begun = begun
        self._arrived = arrived
        self._lost = lost
        self._faulty = faulty
        self._clients: dict[int, ClientTransfers] = {}
        self._receiving: weakref.WeakSet[Receiver] = weakref.WeakSet()
        self._most_bytes = MEMORY_BYTES // processes
        self._arriving_bytes = 0
        self._idle_bytes = 0  # of those, whose clients have sent nothing for a while
        self._line: dict[int, _Offer] = {}  # updates that wait for memory, by connection
        self._round: RoundKey | None = None
        self._base = 0  # number of the state that the round starts from
        self._parts: dict[str, SmallPart] = {}
        self._shared = SharedFrames[tuple[str, range]](SHARED_BYTES)
        self._flows: dict[tuple[int, str, bool], _Bytes] = defaultdict(_Bytes)

    # --- sessions ---------------------------------------------------------------------------

    def begin(self, conn: int, session: HandedSession, keys: PublicKeys, left: str) -> None:
        """Take over the session of a connection, but for an update that the server resumes."""
        self.end(conn)
        self._clients[conn] = ClientTransfers(conn, session, keys, left=left)

    def end(self, conn: int) -> None:
        """End the session of a connection; the server keeps what came of an update."""
        client = self._clients.pop(conn, None)
        if client is not None:
            self._hand_back(client)

    def _hand_back(self, client: ClientTransfers, *, goes_on: bool = False) -> None:
        """Leave a client's update to the server, with the chunks that came.

        Args:
            client: whose session it is.
            goes_on: the session does, and the server asks for the other chunks.
        """
        self._line.pop(client.conn, None)
        for digest, envelope in client.receiver.under_way.items():
            chunks = envelope.assembly.in_memory()
            if chunks or goes_on:
                self._lost(client.conn, digest, client.updates[digest].blobs, chunks, goes_on)
        self._forget_updates(client)
        self._call_next()

    def open_round(self, key: RoundKey | None, parts: dict[str, SmallPart], base: int = 0) -> None:
        """Note the round whose updates are received here, and the parts that clients may fetch.

        No key: the server receives all updates itself, as it does those of another base state.
        Updates of an earlier round that are arriving continue to: the server answers each.
        """
        self._round, self._base, self._parts = key, base, parts
        self._line = {c: o for c, o in self._line.items() if _round_of(o.header) == key}

    def heard(self, conn: int) -> int:
        """Return the number of the newest message that a connection's session had here."""
        client = self._clients.get(conn)
        return 0 if client is None or client.over else client.session.heard

    def stamp(self, conn: int, frames: Frames) -> Frames | None:
        """Return a message of the server as it leaves; None: its session is over."""
        if is_laned(frames) or len(frames[1]) != TAG_BYTES:
            return frames  # a relay's; a chunk, or signed by the server itself
        client = self._clients.get(conn)
        if client is None or client.session.tag != frames[1]:
            return None
        stamped = client.session.stamp(frames)
        flow = self._flows[conn, CONTROL, True]  # what the server could not count
        flow.application += sum(map(len, stamped)) - sum(map(len, frames))
        flow.wire += wire_bytes(stamped) - wire_bytes(frames)
        return stamped

    def take_flows(self, conn: int | None = None) -> list[Flow]:
        """Return what was sent and received since the last call; only an update's of a connection.

        Args:
            conn: the connection; None: all that was sent and received.
        """
        if conn is None:
            flows, self._flows = dict(self._flows), defaultdict(_Bytes)
        else:
            flows = {(conn, UPDATE, False): self._flows.pop((conn, UPDATE, False), _Bytes())}
        return [Flow(*of, f.parts, f.sealed, f.application, f.wire) for of, f in flows.items()]

    # --- messages of clients ----------------------------------------------------------------

    def take(self, conn: int, frames: Frames) -> bool:
        """Do what a client's message asks for; False: it is for the server."""
        client = self._clients.get(conn)
        if client is None or client.over:
            return False
        try:
            received = parse(frames, to_server=True)
            match received.message:
                case Hello():
                    self._hand_back(client)
                    client.over = True
                case Want() as message:
                    return self._serve(client, received, message)
                case Update() as message:
                    return self._begin(client, received, message)
                case Chunk() as message:
                    return self._chunk(client, received, message)
        except FcilError:
            pass  # the server answers it
        except Exception as error:  # our own defect: the server may do better, and no other waits
            keep_details(error)
        return False

    def _say(
        self, client: ClientTransfers, message: Message, *blobs: bytes, about: str = CONTROL
    ) -> bool:
        frames = client.session.frames(message, *blobs)
        if not self._send(client.conn, frames):
            return False
        sealed = len(blobs[0]) if isinstance(message, Chunk) else 0
        parts = isinstance(message, Parts)
        self._flows[client.conn, about, True].add(frames, sealed=sealed, parts=parts)
        return True

    # --- down: parts ------------------------------------------------------------------------

    def _serve(self, client: ClientTransfers, received: Received, want: Want) -> bool:
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
        found = self._shared.use(name)
        if found is None:
            found = self._shared.keep(name, SharedFrame(part.body[part.header.extent(run)]))
        return found

    # --- up: updates ------------------------------------------------------------------------

    def _begin(self, client: ClientTransfers, received: Received, message: Update) -> bool:
        if message.digest in client.receiver.under_way:
            client.session.check(received)
            self._count_up(client, received)
            self._ask(client)
            return True
        if len(received.blobs) != 3 or message.digest == client.left:
            return False
        data, signature, wrap = received.blobs
        if len(wrap) != WRAP_BYTES:
            return False
        header = parse_header(data, max_plain_bytes=UPDATE_BYTES)
        offer = _Offer(header, received.blobs)
        fits = _round_of(header) == self._round and header.core.base == self._base
        if not fits or header.update_id != message.digest:
            return False
        waits = bool(self._line) or not self._has_room(offer)
        if waits and message.unasked:
            return False  # its first chunks are on their way
        verify_header(data, signature, client.keys)
        client.session.check(received)
        self._count_up(client, received)
        self._forget_updates(client)  # a client sends one at a time
        if waits:
            self._line[client.conn] = offer
        else:
            self._receive(client, offer, min(message.unasked, unrequested_chunks(header)))
        return True

    def _has_room(self, offer: _Offer) -> bool:
        """Return True if an update can arrive now; idle ones have as much memory of their own."""
        arriving = self._arriving_bytes - min(self._idle_bytes, self._most_bytes)
        return arriving + offer.size <= self._most_bytes

    def _receive(self, client: ClientTransfers, offer: _Offer, coming: int) -> None:
        """Ask for an update's chunks, of which the first come unasked."""
        digest = str(offer.header.update_id)
        self._arriving_bytes += offer.size
        self._receiving.add(client.receiver)
        client.updates[digest] = offer
        self._begun(client.conn, digest)
        assembly = Assembly(offer.header, path=None)
        self._continue(client, client.receiver.begin(offer.blobs, assembly, _now(), unasked=coming))

    def _call_next(self) -> None:
        """Begin the first updates in line, as many as there is room for."""
        while self._line:
            conn, offer = next(iter(self._line.items()))
            if not self._has_room(offer):
                return
            del self._line[conn]
            self._receive(self._clients[conn], offer, 0)

    def _chunk(self, client: ClientTransfers, received: Received, message: Chunk) -> bool:
        envelope = client.receiver.under_way.get(message.digest)
        if envelope is None:
            return False
        self._count_up(client, received, sealed=len(received.blobs[0]))
        try:
            client.receiver.put(message.digest, message.index, received.blobs[0], _now())
        except WireError as error:
            if not envelope.retries:
                self._forget(client, message.digest)
                self._faulty(client.conn, message.digest, error)
                self._call_next()
                return True
            self._faulty(client.conn, "", error)
        self._continue(client, envelope)
        return True

    def _count_up(self, client: ClientTransfers, received: Received, *, sealed: int = 0) -> None:
        frames = (received.body, received.signature, *received.blobs)
        self._flows[client.conn, UPDATE, False].add(frames, sealed=sealed)

    def _continue(self, client: ClientTransfers, envelope: IncomingEnvelope) -> None:
        if not envelope.complete:
            self._ask(client)
            return
        chunks = [chunk for _, chunk in sorted(envelope.assembly.in_memory().items())]
        blobs = client.updates[envelope.digest].blobs
        self._forget(client, envelope.digest)
        client.left = envelope.digest
        self._arrived(client.conn, envelope.digest, blobs, chunks)
        self._call_next()

    def _ask(self, client: ClientTransfers) -> None:
        client.receiver.pace.most_bytes = share(
            self._credit, len(self._receiving) * self._processes, ASKED_BYTES
        )
        for want in client.receiver.wants(_now()):
            self._say(client, want)

    def _forget_updates(self, client: ClientTransfers) -> None:
        """Forget a client's updates that are arriving."""
        for digest in list(client.receiver.under_way):
            self._forget(client, digest)

    def _forget(self, client: ClientTransfers, digest: str) -> None:
        client.receiver.end(digest)
        offer = client.updates.pop(digest, None)
        if offer is not None:
            self._arriving_bytes -= offer.size
        if not client.receiver.under_way:
            self._receiving.discard(client.receiver)

    def revive(self) -> None:
        """Ask again for requested chunks that never came over a live connection.

        Clients that send nothing make room for the next in line: their memory does not count, and
        where that is too little, the server receives their updates instead.
        """
        now, idle = _now(), list[ClientTransfers]()
        for client in list(self._clients.values()):
            if not client.receiver.under_way:
                continue
            if client.receiver.pace.idle_s(now) >= IDLE_S:
                idle.append(client)
            if client.receiver.revive(now):
                self._ask(client)
        self._idle_bytes = sum(map(_size, idle))
        self._call_next()
        for client in idle:
            if not self._line or self._idle_bytes <= self._most_bytes:
                return
            self._idle_bytes -= _size(client)
            client.left = next(iter(client.updates))
            self._hand_back(client, goes_on=True)


def _size(client: ClientTransfers) -> int:
    return sum(offer.size for offer in client.updates.values())


def _round_of(header: Header) -> RoundKey:
    core = header.core
    return RoundKey(RunId(core.run), core.task, core.kind, core.round)


def _now() -> float:
    return asyncio.get_running_loop().time()
