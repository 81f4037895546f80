"""Keys of one session, from a Diffie-Hellman exchange: their MACs authenticate its messages.

Each side draws an X25519 key for the session and signs its public half (in Hello, in Welcome). What
both derive is unknown to all between them, a relay included, and is forgotten with the session. A
MAC has a quarter of a signature's bytes and takes 2 microseconds; to make a signature takes 38, to
check one 130.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fcil_protocol.errors import BadSignature

SESSION_KEY_BYTES = 32
MAC_BYTES = 16  # HMAC-SHA-256-128, as in RFC 4868
_KEY_BYTES = 32
_INFO = b"fcil/1/session"


@dataclass(frozen=True)
class SessionSide:
    """One side of a session, as the keys of the session are bound to it.

    Attributes:
        nonce: drawn for the session.
        signing: its Ed25519 public key: who it is.
        session_key: its public key of the agreement.
    """

    nonce: bytes
    signing: bytes
    session_key: bytes


@dataclass(frozen=True)
class SessionKeys:
    """The keys of messages' MACs, one for each direction; every key serves one session."""

    to_server: bytes = field(repr=False)
    to_client: bytes = field(repr=False)


class KeyAgreement:
    """One side of the agreement on a session's keys.

    Args:
        secret: its private key, 32 bytes; empty: one is drawn.

    Attributes:
        public: what the other side needs, 32 bytes.
    """

    def __init__(self, secret: bytes = b"") -> None:
        made = X25519PrivateKey.from_private_bytes(secret) if secret else None
        self._secret = made or X25519PrivateKey.generate()
        self.public = self._secret.public_key().public_bytes_raw()

    def agree(self, client: SessionSide, server: SessionSide) -> SessionKeys:
        """Return the session's keys: HKDF-SHA-256 of the shared secret.

        Both sides' nonces are the salt, their other fields in the info: who sees another client or
        server at the other end gets other keys.

        Args:
            client: one side.
            server: the other; `session_key` of the one that is not this side is from a message that
                it signed.

        Raises:
            BadSignature: its key gives no secret: it is one of a few points of small order.
        """
        other = server if client.session_key == self.public else client
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(other.session_key))
        except ValueError as error:
            raise BadSignature(
                "the other side's key for the session is not usable.",
                action="Connect again; if it happens again, its program is faulty.",
            ) from error
        salt = client.nonce + server.nonce
        parties = client.signing + server.signing + client.session_key + server.session_key
        both = HKDF(SHA256(), 2 * _KEY_BYTES, salt, _INFO + parties).derive(shared)
        return SessionKeys(both[:_KEY_BYTES], both[_KEY_BYTES:])


def mac_of(key: bytes, data: bytes) -> bytes:
    """Return the MAC of some data: HMAC-SHA-256, its first 16 bytes."""
    return hmac.digest(key, data, "sha256")[:MAC_BYTES]


def is_mac_of(mac: bytes, key: bytes, data: bytes) -> bool:
    """Return True if this is the data's MAC; takes equally long for every wrong one."""
    return hmac.compare_digest(mac, mac_of(key, data))
