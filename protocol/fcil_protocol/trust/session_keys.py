"""Keys of one session: codes that authenticate its messages, from a Diffie-Hellman exchange.

Each side draws an X25519 key for the session and signs its public half (in Hello, in Welcome). What
both derive is unknown to all between them, a relay included, and is forgotten with the session. A
code takes a fiftieth of a signature's time, and a quarter of its bytes.
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
class SessionKeys:
    """The keys for codes of messages, one for each direction; every key serves one session."""

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

    def agree(self, public: bytes, client_nonce: bytes, server_nonce: bytes) -> SessionKeys:
        """Return the session's keys: HKDF-SHA-256 of the shared secret, salted with both nonces.

        Args:
            public: the other side's public key, from a message that it signed.
            client_nonce: of the session.
            server_nonce: of the session.

        Raises:
            BadSignature: the key gives no secret: it is one of a few points of small order.
        """
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise BadSignature(
                "the other side's key for the session is not usable.",
                action="Connect again; if it happens again, its program is faulty.",
            ) from error
        salt = client_nonce + server_nonce
        both = HKDF(SHA256(), 2 * _KEY_BYTES, salt, _INFO).derive(shared)
        return SessionKeys(both[:_KEY_BYTES], both[_KEY_BYTES:])


def code_of(key: bytes, data: bytes) -> bytes:
    """Return the code of some data: HMAC-SHA-256, its first 16 bytes."""
    return hmac.digest(key, data, "sha256")[:MAC_BYTES]


def is_code_of(code: bytes, key: bytes, data: bytes) -> bool:
    """Return True if this is the data's code; takes equally long for every wrong one."""
    return hmac.compare_digest(code, code_of(key, data))
