"""A client without images, worker or disk, of which a process holds very many (many_clients.py).

It is made of the protocol's and the client's own pieces: sockets, sessions, ciphers, transfers and
fetches are real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

import fcil_protocol
from fcil_client.link.url_fetch import fetch_chunks
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    Core,
    open_body,
    parse_header,
    seal,
    unwrap_key,
    verify_header,
    wrap_key,
)
from fcil_protocol.envelopes.header import chunk_bytes_for
from fcil_protocol.envelopes.transfer import (
    OBJECT_BYTES,
    UNASKED_SPAN_BYTES,
    Receiver,
    Sender,
    unrequested_chunks,
)
from fcil_protocol.envelopes.window import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES
from fcil_protocol.errors import FcilError
from fcil_protocol.link.zmq_link import Dealer, LinkNews, Links
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    Ack,
    Bye,
    Chunk,
    Fetched,
    Hello,
    Message,
    Nack,
    Parts,
    Pull,
    RoundClosed,
    RoundOpen,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

METHOD = "payload==1"
CLASSES = ("cat", "dog")
LIMIT = 1 << 30


class Thin:
    """One client, which takes part in a given number of rounds."""

    def __init__(self, member: dict[str, str], rounds: int) -> None:
        self.keys = PrivateKeys.derive(bytes.fromhex(member["seed"]), b"bench")
        self.client = member["client"]
        certificate = Certificate.from_bytes(bytes.fromhex(member["certificate"]))
        self.federation = certificate.federation
        self.server = certificate.verify(self.federation, time.time())
        self.address = member["address"]
        self.link_key = bytes.fromhex(member.get("link_key", "")) or self.server.curve
        self.relay: PublicKeys | None = None
        self.rounds = rounds
        self.values = 0
        self.acked = 0
        self.refused: list[str] = []
        self.fetched = 0  # bytes from the object store
        self.unfetched = 0  # parts that it did not give
        self._fetching: set[str] = set()  # digests
        self._outgoing: dict[str, Sender] = {}
        self._receiver = Receiver(MAX_WINDOW_BYTES)
        self._missing: set[str] = set()
        self._held: set[str] = set()
        self._ahead: dict[str, int] = {}
        self._order: RoundOpen | None = None

    async def run(self, values: int, links: Links) -> None:
        """Take part until the server says goodbye."""
        self.values = values
        host, _, port = self.address.rpartition(":")
        self.link = Dealer(
            curve_secret=self.keys.curve_secret,
            curve_public=self.keys.public.curve,
            server_key=self.link_key,
            links=links,
        )
        self.link.connect(host, int(port))
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._listen()
        finally:
            self.link.close()

    async def _listen(self) -> None:
        while True:
            news = await self.link.recv()
            if isinstance(news, LinkNews):
                if news.state == "up":
                    self._receiver.lose()
                    self._greet("", "")
                elif self.acked + len(self.refused) > self.rounds:
                    # The server ends, and its goodbye was lost.
                    return
            elif self._take(parse(news)):
                return

    def _greet(self, run: str, schema: str) -> None:
        self.channel = Channel(self.keys, self.server)
        hello = Hello(
            nonce=self.channel.nonce,
            protocol=fcil_protocol.PROTOCOL_VERSION,
            oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
            package="0",
            federation=self.federation,
            client=self.client,
            methods=[METHOD],
            run=run,
            schema_digest=schema,
            takes_compact=True,
            session_key=self.channel.session_key,
        )
        self._say(hello)

    def _say(self, message: Message, *blobs: bytes) -> None:
        if not self.link.send(self.channel.frames(message, *blobs)):
            self.refused.append(f"{message.type} did not leave")

    def _take(self, received: Received) -> bool:
        if isinstance(received.message, Welcome):
            self.channel.peer_nonce = received.message.server_nonce
        message = self.channel.check(received)
        match message:
            case Welcome():
                self.welcome = message
                window = min(message.credit, MAX_WINDOW_BYTES)
                self.link.allow(window)
                self._receiver.pace.most_bytes = window
                if message.summing_relay is not None:
                    self.relay = PublicKeys.from_fields(message.summing_relay.model_dump())
                if message.session_key is not None:
                    self.channel.agree_as_client(message.session_key)
                if message.ready:
                    self._announce()
                else:
                    self._greet(message.run, message.schema_digest)
            case RoundOpen():
                self._asked(message)
            case Parts():
                self._part(received)
            case Chunk():
                data = received.blobs[0]
                self._receiver.put(message.digest, message.index, data, time.monotonic())
                self._go_on()
            case Want() | Pull():
                self._send_chunks(message.digest, message.chunks, message.span)
            case Ack():
                self._outgoing.pop(message.digest, None)
                self.acked += 1
            case Nack():
                self.refused.append(f"{message.code}: {message.text}")
            case Bye():
                return True
            case RoundClosed():
                pass
        return False

    # --- up ---------------------------------------------------------------------------------

    def _core(self, kind: str, task: int, round_: int, base: int) -> Core:
        return Core(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            federation=self.federation,
            run=self.welcome.run,
            direction="update",
            sender=self.client,
            sender_key=self.keys.public.fingerprint,
            recipient="server",
            method=self.welcome.method,
            schema=self.welcome.schema_digest,
            task=task,
            round=round_,
            kind=kind,
            base=base,
        )

    def _offer(self, payload: Payload, core: Core, *, waits: bool = False) -> None:
        plain = pack(payload, compact=True)
        sealed, key = seal(plain, core, self.keys, chunk_bytes=chunk_bytes_for(len(plain)))
        header = sealed.parsed
        first = 0 if waits else unrequested_chunks(header)
        wraps = [wrap_key(key, sealed.header, self.server)]
        self._outgoing[header.update_id] = Sender(header, sealed.stored(wraps[0]).read)
        if self.relay is not None and core.kind != INVENTORY:
            wraps.append(wrap_key(key, sealed.header, self.relay))
        self._say(
            Update(digest=header.update_id, unasked=first), sealed.header, sealed.signature, *wraps
        )
        span = max(1, UNASKED_SPAN_BYTES // header.chunk_bytes)
        self._send_chunks(header.update_id, list(range(first)), span)

    def _send_chunks(self, digest: str, chunks: list[int], span: int) -> None:
        if digest not in self._outgoing:
            return
        for message, data in self._outgoing[digest].messages(chunks, span):
            self._say(message, data)

    def _announce(self) -> None:
        counts = {name: np.full(len(CLASSES), 5, np.int64) for name in ("train", "test")}
        payload = Payload({**counts}, {"names": list(CLASSES)})
        self._offer(payload, self._core(INVENTORY, -1, 0, 0))

    # --- down -------------------------------------------------------------------------------

    def _asked(self, order: RoundOpen) -> None:
        self._order = order
        wanted = [p for p in order.parts if p.digest not in self._held]
        self._missing = {p.digest for p in wanted}
        for part in wanted:  # a header and its first chunks together, as a client does
            size = chunk_bytes_for(part.sealed_bytes)
            count = min(-(-part.sealed_bytes // size), MIN_WINDOW_BYTES // size)
            if self.welcome.object_store and part.sealed_bytes >= OBJECT_BYTES:
                count = 0  # its header comes with an address
            self._ahead[part.digest] = count
            span = max(1, UNASKED_SPAN_BYTES // size)
            self._say(Want(digest=part.digest, chunks=list(range(count)), span=span, header=True))
        self._go_on()

    def _part(self, received: Received) -> None:
        assert isinstance(received.message, Parts)
        data, signature, _ = received.blobs
        verify_header(data, signature, self.server)
        header = parse_header(data, max_plain_bytes=LIMIT)
        ahead = self._ahead.pop(header.update_id, 0)
        assembly, now = Assembly(header, path=None), time.monotonic()
        if url := received.message.url:
            if header.update_id not in self._fetching:
                self._fetching.add(header.update_id)
                self._tasks.create_task(self._from_store(url, received.blobs, assembly))
            return
        self._receiver.begin(received.blobs, assembly, now, unasked=ahead)
        self._go_on()

    async def _from_store(self, url: str, blobs: Sequence[bytes], assembly: Assembly) -> None:
        size = 0

        def take(index: int, data: bytes) -> None:
            nonlocal size
            size += len(data)
            assembly.put(index, data)

        header = assembly.header
        try:
            await fetch_chunks(url, header, assembly.missing(len(header.hashes)), take)
        except FcilError:  # the server sends the rest
            self.unfetched += 1
        self._fetching.discard(header.update_id)
        self.fetched += size
        self._say(Fetched(digest=header.update_id, size=size))
        self._receiver.begin(blobs, assembly, time.monotonic(), unasked=0)
        self._go_on()

    def _go_on(self) -> None:
        for digest, envelope in list(self._receiver.under_way.items()):
            if envelope.complete:
                self._receiver.end(digest)
                key = unwrap_key(envelope.wrap, envelope.header_bytes, self.keys)
                open_body(envelope.header, key, envelope.assembly.steps())
                self._missing.discard(digest)
                self._held.add(digest)
        for want in self._receiver.wants(time.monotonic()):
            self._say(want)
        if self._order is not None and not self._missing:
            order, self._order = self._order, None
            drawn = np.random.default_rng().random(self.values, dtype=np.float32)
            payload = Payload({"w0": drawn, "n": np.array([5], np.int64)})
            core = self._core(order.kind, order.task, order.round, order.base)
            self._offer(payload, core, waits=order.ask_first)
