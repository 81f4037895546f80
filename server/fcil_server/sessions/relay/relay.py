"""A relay: carries its clients' messages to the server, and a broadcast part once over the uplink.

It holds no payload key and signs nothing for others. Messages pass through untouched, except that a
client's Want for chunks of a part is answered from the cache, or with chunks that the relay fetches
once for all waiting clients. It never acknowledges anything: only the server's Ack lets a client
forget its data. While there is no session with the server nothing listens, so a client behind a
relay loses its session and finds it again exactly as on a direct link.

Where it adds up updates (`summing`), it opens those of its clients, and signs sums of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fcil_protocol
from fcil_protocol.envelopes.window import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, TOTAL_BYTES
from fcil_protocol.errors import (
    FcilError,
    StorageError,
    TrustError,
    WireError,
    WrongClock,
    as_fcil_error,
    from_code,
)
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.link.dial import ADDRESS_S, REFUSALS, Dial, dial, flooded
from fcil_protocol.link.enrol_with_ticket import EnrolmentRecord
from fcil_protocol.link.interface import COME_AGAIN, ClientLink, LinkNews, wire_bytes
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import Ack, Admit, Chunk, Message, Nack, Uplink, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.process.terminal import count_of
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.allow_list import RELAY_BYTES
from fcil_server.sessions.relay.cache import Cache
from fcil_server.sessions.relay.session import OpenLink, RelaySession
from fcil_server.sessions.relay.summing import Summing

# Refusals that a retry cannot mend.
FATAL = frozenset({
    "revoked", "membership_expired", "unknown_client", "version_mismatch", "wrong_federation",
})  # fmt: skip

RETRY_S = 10.0  # before a session is tried again after one that could not begin

# Bytes of the uplink; chunks fetched, from the cache, sent to waiting clients; messages; sums that
# the server has, and updates in them.
COUNTED = (
    *("uplink_sent", "uplink_received", "fetched", "from_cache", "fanned_out", "passed"),
    *("sums", "added"),
)

Notify = Callable[[str, str], None]


class Relay:
    """One relay of a federation.

    Args:
        record, keys: its identity.
        address: the address that it gives its clients, HOST:PORT.
        cache: its chunks.
        open_link: opens the listener, again for every session with the server.
        notify: shows a note: level, text.
        keep: saves the record once it has a newer certificate of the server.
        make: starts a link to one of the server's addresses.
        incoming: folder for updates that it adds up; None: all updates pass.

    Attributes:
        counts: totals since the start, see `status`.

    Raises:
        TrustError: the certificate of the enrolment cannot be verified.
    """

    def __init__(
        self,
        record: EnrolmentRecord,
        keys: PrivateKeys,
        *,
        address: str,
        cache: Cache,
        open_link: OpenLink,
        notify: Notify,
        keep: Callable[[EnrolmentRecord], None],
        make: Dial = dial,
        incoming: Path | None = None,
    ) -> None:
        certificate = Certificate.from_bytes(bytes.fromhex(record.certificate))
        try:
            self._server = certificate.verify(record.federation, time.time())
        except WrongClock:  # the first Admit is checked again; many devices set their clock late
            self._server = certificate.keys
        self._record = record
        self._saved = True
        self._keys = keys
        self._address = address
        self._cache = cache
        self._open_door = open_link
        self._notify = notify
        self._keep = keep
        self._make = make
        self._incoming = incoming
        self._at = 0
        self._uplink: ClientLink
        self._said = ""
        self._obstacle = ""  # why the last session could not begin
        self._session: RelaySession | None = None
        self._channel = Channel(keys, self._server)
        self._stopping = asyncio.Event()
        self._failure: FcilError | None = None
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    # --- life -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Relay until `stop`, or until a refusal that a retry cannot mend.

        Raises:
            FcilError: why it cannot relay.
        """
        self._connect()
        task = asyncio.create_task(self._guard())
        try:
            await self._stopping.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._end_session()
            self._uplink.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the relay."""
        self._stopping.set()

    def line(self) -> str:
        """Return one line about its work, for its supervisor."""
        if self._session is None:
            return f"not connected to {self._record.addresses[self._at]}"
        return f"carries {count_of(len(self._session.lanes), 'client')}"

    def status(self) -> dict[str, Any]:
        """Return its status; counts are bytes of the uplink and numbers of chunks."""
        return {
            "running": True,
            "relay": self._record.name,
            "federation": self._record.federation,
            "server": self._record.addresses[self._at],
            "behind_relay": bool(self._record.link_key),
            "address": self._address,
            "up": self._session is not None,
            "clients": len(self._session.lanes) if self._session else 0,
            "cached_chunks": len(self._cache),
            "cached_bytes": self._cache.bytes,
            "adds_up": self._incoming is not None,
            **self.counts,
        }

    async def _guard(self) -> None:
        try:
            while True:
                await self._hear(await self._uplink.recv())
        except Exception as error:
            self._failure = as_fcil_error(error)
        self.stop()

    def fail(self, error: FcilError) -> None:
        """End with an error."""
        self._failure = self._failure or error
        self.stop()

    # --- the uplink -------------------------------------------------------------------------

    def _connect(self) -> None:
        address = self._record.addresses[self._at]
        link_key = bytes.fromhex(self._record.link_key)  # of the relay that this one is behind
        peer = replace(self._server, curve=link_key) if link_key else self._server
        self._uplink = self._make(address, self._keys, peer)

    async def _hear(self, news: LinkNews | tuple[bytes, ...]) -> None:
        if isinstance(news, LinkNews):
            await self._link_news(news)
            return
        self.counts["uplink_received"] += wire_bytes(news)
        try:
            if relay_frames.is_laned(news):
                if self._session is not None:
                    self._session.on_server_message(relay_frames.read_down(news))
            else:
                self._own(parse(news))
        except (WireError, TrustError) as error:
            if error.code in FATAL:
                raise
            if self._session is None:
                await self._begin_again(error)
            else:
                self._notify("warning", f"a message of the server was refused: {error}")

    async def _link_news(self, news: LinkNews) -> None:
        address = self._record.addresses[self._at]
        if news.state == "up":
            self._note("info", f"connected to {address}")
            self._channel = Channel(self._keys, self._server)
            self._send(
                Uplink(
                    nonce=self._channel.nonce,
                    protocol=fcil_protocol.PROTOCOL_VERSION,
                    oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
                    package=version("fcil"),
                    federation=self._record.federation,
                    relay=self._record.client_id,
                    address=self._address,
                    sums=self._incoming is not None,
                )
            )
        elif news.state == "refused":
            again = " The relay retries automatically." if news.reason == COME_AGAIN else ""
            self._note("error", REFUSALS[news.reason] + again)
        elif news.state == "flooded":
            self._note("warning", flooded(address))
        else:
            await self._end_session()
            away = "nothing answers at" if news.reason else "the connection was lost to"
            self._note("warning", f"{away} {address}; trying again")
            if news.reason == "unreachable" and len(self._record.addresses) > 1:
                await asyncio.sleep(ADDRESS_S)
                self._uplink.close()
                self._at = (self._at + 1) % len(self._record.addresses)
                self._connect()

    async def _begin_again(self, error: FcilError) -> None:
        """Connect again after a pause: without a session, the server must not count on this relay.

        The cause, such as a wrong clock, may be over by then.
        """
        if error.message != self._obstacle:
            self._obstacle = error.message
            self._notify("error", f"no session with the server began: {error} Trying again")
        self._uplink.close()
        await asyncio.sleep(RETRY_S)
        self._at = (self._at + 1) % len(self._record.addresses)
        self._connect()

    def _note(self, level: str, text: str) -> None:
        if text != self._said:  # not repeated for every attempt
            self._said = text
            self._notify(level, text)

    def _send(self, message: Message) -> None:
        self.push(self._channel.frames(message))

    def push(self, frames: list[bytes]) -> bool:
        """Send over the uplink; False if its queue is full or it is down."""
        sent = self._uplink.send(frames)
        if sent:
            self.counts["uplink_sent"] += wire_bytes(frames)
        return sent

    def _own(self, received: Received) -> None:
        """Take a message of the server to the relay itself."""
        message = received.message
        if isinstance(message, Admit) and self._session is None:
            self._begin(received, message)
            return
        self._channel.check(received)
        # With a digest it is about one update or part: of a client that is revoked, say.
        if isinstance(message, Nack) and message.code in FATAL and not message.digest:
            raise from_code(message.code, message.text, message.action)
        if self._session is None:
            if isinstance(message, Nack):
                self._note("warning", f"the server refuses: {message.text}")
            return
        match message:
            case Admit():
                self._allow(message)
                self._session.on_admit(message)
            case Chunk():
                self._session.on_chunk(message, received.blobs[0])
            case Want() if self._session.summing is not None:
                self._session.summing.on_want(message)
            case Ack() | Nack() if self._session.take_answer(message):
                pass
            case Nack() if message.digest:
                self._session.on_part_refused(message.digest)
            case Nack():
                self._notify("warning", f"the server refused a message: {message.text}")

    def _allow(self, message: Admit) -> None:
        """Let the server send the windows of all behind this relay, and its own."""
        behind = max(TOTAL_BYTES, MIN_WINDOW_BYTES * len(message.members))
        behind += RELAY_BYTES * len(message.relays)
        self._uplink.allow(min(message.credit, MAX_WINDOW_BYTES) + behind)

    def _begin(self, received: Received, message: Admit) -> None:
        certificate = Certificate.from_bytes(message.certificate)
        server = certificate.verify(self._record.federation, time.time())
        certificate.refuse_older(Certificate.from_bytes(bytes.fromhex(self._record.certificate)))
        self._channel.trust(server)
        self._channel.check(received)
        self._channel.peer_nonce = message.server_nonce
        self._allow(message)
        self._server = server
        newer = message.certificate.hex() != self._record.certificate
        if newer:
            self._record = replace(self._record, certificate=message.certificate.hex())
        if newer or not self._saved:
            self._save()
        session = RelaySession(
            self._channel,
            server,
            message,
            cache=self._cache,
            counts=self.counts,
            push=self.push,
            fail=self.fail,
            summing=None if self._incoming is None else self._summing,
        )
        session.open(self._open_door)
        self._session = session
        self._obstacle = ""
        members = count_of(len(message.members), "member")
        self._note("info", f"listening on {self._address} for {members}")

    def _summing(self, session: RelaySession) -> Summing:
        assert self._incoming is not None, "it adds up updates"
        return Summing(
            self._keys,
            ClientId(self._record.client_id),
            FederationId(self._record.federation),
            self._server,
            credit=session.credit,
            incoming=self._incoming,
            push=session.send,
            pull=session.send_down,
            key_of=session.key_of,
            notify=self._notify,
            counts=self.counts,
        )

    def _save(self) -> None:
        """Save the record; a disk that cannot take it costs no service, since each Admit has it."""
        try:
            self._keep(self._record)
        except StorageError as error:
            if self._saved:
                again = "The relay works on and tries again at its next session."
                self._notify("warning", f"{error} {again}")
            self._saved = False
        else:
            self._saved = True

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
