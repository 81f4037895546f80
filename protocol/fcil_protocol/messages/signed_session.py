"""An authenticated session between one client and the server, above the link.

Each side draws a nonce when the session begins (client in Hello or Enrol, server in Welcome) and
puts the *other's* nonce and a growing number into every message it signs. Once Hello and Welcome
have brought the keys of the session, messages carry a MAC by them in place of a signature and a
nonce. So a message of another session, an older one of this session, or one for another receiver is
refused, on a direct link and through a relay alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.messages.frames import Received, encode, numbered
from fcil_protocol.messages.messages import (
    NONCE_BYTES,
    Enrol,
    Hello,
    Message,
    Rotate,
    Uplink,
    Welcome,
)
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, verify_signature
from fcil_protocol.trust.session_keys import (
    MAC_BYTES,
    KeyAgreement,
    SessionSide,
    is_mac_of,
    mac_of,
)

PURPOSE = "message"
TAG_BYTES = 8  # of a session that was handed over; in place of a signature, which is longer
_OPENERS = (Hello, Enrol, Uplink)  # they carry the sender's own nonce: the peer's is unknown yet
_ALWAYS_SIGNED = (*_OPENERS, Welcome, Rotate)  # who one is: a MAC shows that only in its session


def new_nonce() -> bytes:
    """Draw a session nonce."""
    return os.urandom(NONCE_BYTES)


class Channel:
    """Authenticates outgoing messages and verifies incoming ones.

    Attributes:
        nonce: this side's; the peer repeats it in every message.
        peer_nonce: the peer's, once known.
        raw_digests: the peer reads digests as bytes.
    """

    def __init__(self, keys: PrivateKeys, peer: PublicKeys) -> None:
        self._keys = keys
        self._peer = peer
        self.nonce = new_nonce()
        self.peer_nonce = bytes(NONCE_BYTES)
        self.raw_digests = False
        self._sent = 0
        self._heard = 0
        self._mine = self._theirs = b""  # the keys of MACs, once the session has some
        self._peer_has_them = False
        self._tag = b""  # of a session that was handed over

    @cached_property
    def _own(self) -> KeyAgreement:
        return KeyAgreement()

    @property
    def session_key(self) -> bytes:
        """This side's public key for the session, drawn when it is first asked for."""
        return self._own.public

    @property
    def agreed(self) -> bool:
        """True once this side has the session's keys."""
        return bool(self._mine)

    def agree_as_client(self, public: bytes) -> None:
        """Take the server's `session_key` from its Welcome; this side's was in the Hello.

        Raises:
            BadSignature: it is not usable.
        """
        keys = self._own.agree(self._this_side(), self._other_side(public))
        self._mine, self._theirs = keys.to_server, keys.to_client
        self._peer_has_them = True

    def agree_as_server(self, public: bytes) -> None:
        """Take a client's `session_key` from its Hello; this side's follows in the Welcome.

        Raises:
            BadSignature: it is not usable.
        """
        keys = self._own.agree(self._other_side(public), self._this_side())
        self._mine, self._theirs = keys.to_client, keys.to_server

    def _this_side(self) -> SessionSide:
        return SessionSide(self.nonce, self._keys.public.signing, self.session_key)

    def _other_side(self, public: bytes) -> SessionSide:
        return SessionSide(self.peer_nonce, self._peer.signing, public)

    def hand_over(self) -> HandedSession:
        """Return what another process needs to authenticate this session's messages from now on.

        What `frames` makes then has the session's tag in place of a number and a MAC, which
        `HandedSession.stamp` gives it.
        """
        assert self._peer_has_them, "its messages carry a MAC"
        self._tag = os.urandom(TAG_BYTES)
        keys = self._mine, self._theirs
        return HandedSession(self._tag, *keys, self._sent, self._heard, self.raw_digests)

    def note_heard(self, seq: int) -> None:
        """Refuse messages up to this number: another process has taken that one."""
        self._heard = max(self._heard, seq)

    def trust(self, peer: PublicKeys) -> None:
        """Accept the peer's keys from a certificate that was just verified."""
        self._peer = peer

    def frames(self, message: Message, *blobs: bytes) -> list[bytes]:
        """Stamp, authenticate and encode a message."""
        if self._tag or not message.signed:
            tag = self._tag if message.signed else b""
            return [encode(message, raw_digests=self.raw_digests), tag, *blobs]
        self._sent += 1
        if self._peer_has_them and not isinstance(message, _ALWAYS_SIGNED):
            stamped = message.model_copy(update={"seq": self._sent})
            body = encode(stamped, raw_digests=self.raw_digests)
            return [body, mac_of(self._mine, body), *blobs]
        nonce = self.nonce if isinstance(message, _OPENERS) else self.peer_nonce
        stamped = message.model_copy(update={"nonce": nonce, "seq": self._sent})
        body = encode(stamped, raw_digests=self.raw_digests)
        if isinstance(message, Welcome):
            self._peer_has_them = self.agreed
        return [body, self._keys.sign(PURPOSE, body), *blobs]

    def check(self, received: Received) -> Message:
        """Return the message if the peer sent it in this session and it is new.

        Raises:
            BadSignature: not by the peer, or of another session.
            WireError: repeated.
        """
        message = received.message
        if not message.signed:
            return message  # a chunk, whose hash is in a signed header, or a pull
        if len(received.signature) == MAC_BYTES and not isinstance(message, _ALWAYS_SIGNED):
            _check_mac(received, self._theirs)
        else:
            verify_signature(self._peer.signing, PURPOSE, received.body, received.signature)
            if isinstance(message, _OPENERS):
                return message  # opens a session: its nonce is the peer's own
            if message.nonce != self.nonce:
                raise BadSignature(f"the message {message.type} from another session was refused.")
        self._heard = _newer(message, self._heard)
        return message


@dataclass
class HandedSession:
    """A server's session with a client, in the process that holds the client's connection.

    It checks the messages that this process takes; the server checks all others by itself. It gives
    a MAC to those of both.

    Attributes:
        tag: in the server's messages of this session.
        mine, theirs: the keys of MACs, of this side and of the client.
        sent, heard: the newest number of a message, each way.
        raw_digests: the client reads digests as bytes.
    """

    tag: bytes
    mine: bytes = field(repr=False)
    theirs: bytes = field(repr=False)
    sent: int
    heard: int
    raw_digests: bool

    def stamp(self, frames: Sequence[bytes]) -> list[bytes]:
        """Number and authenticate a message that the server has encoded."""
        self.sent += 1
        body = numbered(frames[0], self.sent)
        return [body, mac_of(self.mine, body), *frames[2:]]

    def frames(self, message: Message, *blobs: bytes) -> list[bytes]:
        """Number, authenticate and encode a message."""
        made = [encode(message, raw_digests=self.raw_digests), b"", *blobs]
        return self.stamp(made) if message.signed else made

    def check(self, received: Received) -> None:
        """Refuse a message that the client did not send in this session, or that is not new.

        Raises:
            BadSignature, WireError: see `Channel.check`.
        """
        _check_mac(received, self.theirs)
        self.heard = _newer(received.message, self.heard)


def _newer(message: Message, heard: int) -> int:
    """Return the number of a message, or refuse it if it is not newer than those heard."""
    if message.seq <= heard:
        raise WireError(f"the message {message.type} arrived twice or late: {message.seq}.")
    return message.seq


def _check_mac(received: Received, key: bytes) -> None:
    """Refuse a message whose MAC is not by the keys of this session."""
    if not key or not is_mac_of(received.signature, key, received.body):
        raise BadSignature(
            f"the MAC of a {received.message.type} does not match its {len(received.body)} "
            "bytes and the keys of this session.",
            action="It was altered or is of another session; none of it was used.",
        )
