"""The link to the server, one of its addresses at a time, and the signed session on it."""

from __future__ import annotations

import time
from dataclasses import replace

from fcil_client.state.home import Enrolment
from fcil_protocol.envelopes.window import MAX_WINDOW_BYTES
from fcil_protocol.errors import WireError, WrongClock
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.zmq_link import ClientLink, LinkNews
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Bye, Decline, Hello, Message, Nack, Welcome
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys


class Connection:
    """Sends the messages that a session allows, and verifies those that arrive.

    Args:
        make: starts a link to one address.

    Attributes:
        server: the server's keys, pinned at enrolment or from its newest certificate.
        sent_bytes, received_bytes: of messages, since the start.
        clock_s: lower and upper bound of this clock's lag behind the server's, in s, as of the last
            Welcome; None: no server has reported its clock.

    Raises:
        TrustError: the certificate of the enrolment cannot be verified.
    """

    def __init__(self, enrolment: Enrolment, keys: PrivateKeys, make: Dial = dial) -> None:
        certificate = Certificate.from_bytes(bytes.fromhex(enrolment.certificate))
        try:
            self.server = certificate.verify(enrolment.federation, time.time())
        except WrongClock:  # the first Welcome is checked again; many devices set their clock late
            self.server = certificate.keys
        self._addresses = enrolment.addresses
        self._relay_key = bytes.fromhex(enrolment.link_key)
        self._at = 0
        self._keys = keys
        self._make = make
        self._channel = Channel(keys, self.server)
        self._welcomed = False
        self._begun_s = time.time()
        self.clock_s: tuple[float, float] | None = None
        self.sent_bytes = self.received_bytes = 0
        self._unsent: dict[tuple[str, int, str, int], Decline] = {}
        self._link: ClientLink

    # --- the link ---------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The HOST:PORT that is connected or tried."""
        return self._addresses[self._at]

    def open(self) -> None:
        """Start connecting; `recv` returns the result."""
        peer = replace(self.server, curve=self._relay_key) if self._relay_key else self.server
        self._link = self._make(self.address, self._keys, peer)

    def try_next_address(self) -> None:
        """Try the next address instead; no call of `recv` may be waiting."""
        self._link.close()
        self._at = (self._at + 1) % len(self._addresses)
        self.open()

    def use_addresses(self, addresses: tuple[str, ...]) -> None:
        """Use these addresses from now on; no call of `recv` may be waiting."""
        self._link.close()
        self._addresses, self._at = addresses, 0
        self.open()

    @property
    def has_other_addresses(self) -> bool:
        """True if `try_next_address` has another address to try."""
        return len(self._addresses) > 1

    async def recv(self) -> LinkNews | tuple[bytes, ...]:
        """Wait for the next message or link news."""
        news = await self._link.recv()
        if isinstance(news, tuple):
            self.received_bytes += sum(map(len, news))
        return news

    def close(self) -> None:
        """End the link."""
        self._welcomed = False
        self._link.close()

    # --- the session ------------------------------------------------------------------------

    @property
    def nonce(self) -> bytes:
        """This side's nonce of the session; a Welcome repeats it."""
        return self._channel.nonce

    @property
    def session_key(self) -> bytes:
        """This side's public key for the session; a Hello carries it."""
        return self._channel.session_key

    def begin(self) -> None:
        """Begin a new session; its first message is a Hello with `nonce` and `session_key`."""
        self._channel = Channel(self._keys, self.server)
        self._welcomed = False
        self._begun_s = time.time()

    def on_connection_lost(self) -> None:
        """Mark the session as ended: the link is lost."""
        self._welcomed = False

    def accept(self, received: Received, welcome: Welcome, server: PublicKeys) -> None:
        """Accept a Welcome by a server whose certificate was verified; the session is open.

        Raises:
            TrustError, WireError: the Welcome is not signed by that server, or is not new.
        """
        self._channel.trust(server)
        self._channel.check(received)
        self._channel.peer_nonce = welcome.server_nonce
        self._channel.raw_digests = welcome.compact
        if welcome.session_key is not None:
            self._channel.agree_as_client(welcome.session_key)
        self._link.allow(min(welcome.credit, MAX_WINDOW_BYTES))
        self.server = server
        self._welcomed = True
        if welcome.clock_ms:
            # Written between these two times: no symmetry of the two directions is assumed.
            said = welcome.clock_ms / 1000
            self.clock_s = (said - time.time(), said - self._begun_s)
        unsent, self._unsent = self._unsent, {}
        for message in unsent.values():
            if message.run == welcome.run:
                self.send(message)

    @property
    def is_open(self) -> bool:
        """True while a session is open: its messages can be sent."""
        return self._welcomed

    def check(self, received: Received) -> Message:
        """Return the message if the server signed it in this session and it is new.

        Raises:
            TrustError, WireError: it did not, or the message precedes the Welcome that it needs.
        """
        message = self._channel.check(received)
        if not self._welcomed and not isinstance(message, Nack | Bye):
            raise WireError(f"the message {message.type} came before the Welcome of its session.")
        return message

    def send(self, message: Message, *blobs: bytes) -> None:
        """Queue a message.

        Before a Welcome the server's nonce is unknown, and only a Hello can be signed. Other
        messages are dropped then, since each is repeated in the new session, except a Decline,
        which is kept until it can be sent.
        """
        sent = False
        if self._welcomed or isinstance(message, Hello):
            frames = self._channel.frames(message, *blobs)
            sent = self._link.send(frames)
            self.sent_bytes += sum(map(len, frames)) if sent else 0
        if not sent and isinstance(message, Decline):
            self._unsent[(message.run, message.task, message.kind, message.round)] = message
