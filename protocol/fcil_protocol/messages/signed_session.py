"""A signed session between one client and the server, above the link.

Each side draws a nonce when the session begins (client in Hello or Enrol, server in Welcome) and
puts the *other's* nonce and a growing number into every message it signs. So a message of another
session, an older one of this session, or one for another receiver is refused, on a direct link and
through a relay alike.
"""

from __future__ import annotations

import os

from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.messages.frames import Received, encode
from fcil_protocol.messages.messages import NONCE_BYTES, Enrol, Hello, Message, Uplink
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, verify_signature

PURPOSE = "message"
_OPENERS = (Hello, Enrol, Uplink)  # they carry the sender's own nonce: the peer's is unknown yet


def new_nonce() -> bytes:
    """Draw a session nonce."""
    return os.urandom(NONCE_BYTES)


class Channel:
    """Signs outgoing messages and verifies incoming ones.

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

    def trust(self, peer: PublicKeys) -> None:
        """Accept the peer's keys from a certificate that was just verified."""
        self._peer = peer

    def frames(self, message: Message, *blobs: bytes) -> list[bytes]:
        """Stamp, sign and encode a message."""
        if not message.signed:
            return [encode(message, raw_digests=self.raw_digests), b"", *blobs]
        self._sent += 1
        nonce = self.nonce if isinstance(message, _OPENERS) else self.peer_nonce
        stamped = message.model_copy(update={"nonce": nonce, "seq": self._sent})
        body = encode(stamped, raw_digests=self.raw_digests)
        return [body, self._keys.sign(PURPOSE, body), *blobs]

    def check(self, received: Received) -> Message:
        """Return the message if the peer signed it in this session and it is new.

        Raises:
            BadSignature: not signed by the peer.
            WireError: of another session, or repeated.
        """
        message = received.message
        if not message.signed:
            return message  # a chunk: its hash is in a signed header
        verify_signature(self._peer.signing, PURPOSE, received.body, received.signature)
        if isinstance(message, _OPENERS):
            return message  # opens a session: its nonce is the peer's own
        if message.nonce != self.nonce:
            raise BadSignature(f"a {message.type} from another session was refused.")
        if message.seq <= self._heard:
            raise WireError(f"a {message.type} arrived twice or late: {message.seq}.")
        self._heard = message.seq
        return message
