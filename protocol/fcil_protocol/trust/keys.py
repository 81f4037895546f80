"""Keys of a participant: link, signatures, sealing.

Every participant, client or server, has three key pairs: CURVE (X25519, the link), Ed25519
(signatures) and X-Wing (ML-KEM-768 with X25519, to open payloads that are sealed for it).

All signatures are over ``fcil/1/<purpose>`` NUL data, so none is valid for another purpose.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.trust.key_file import SECRET_BYTES, check_checksum, load_secrets, save_secrets

CURVE_BYTES = 32
SIGNING_BYTES = 32
SIGNATURE_BYTES = 64
_MLKEM_SEED_BYTES = 64
_MLKEM_PUBLIC_BYTES = 1184
SEALING_BYTES = _MLKEM_PUBLIC_BYTES + 32  # ML-KEM-768, then X25519
FINGERPRINT_DIGITS = 32  # 128 bits of SHA-256


def fingerprint_of(key: bytes) -> str:
    """Return 32 hex digits of the SHA-256 of a public key, for comparison by people."""
    return hashlib.sha256(key).hexdigest()[:FINGERPRINT_DIGITS]


def signed_form(purpose: str, data: bytes) -> bytes:
    """Return the bytes that a signature of data for one purpose (one word) covers."""
    assert purpose.isidentifier(), "a purpose is one word"
    return b"fcil/1/" + purpose.encode("ascii") + b"\0" + data


def verify_signature(public: bytes, purpose: str, data: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature made with `PrivateKeys.sign` for the same purpose.

    Raises:
        BadSignature: the signature does not match.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed_form(purpose, data))
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(
            f"the signature of a {purpose} does not match its {len(data)} bytes and the key "
            f"{fingerprint_of(public)}.",
            action="The bytes were altered or signed with another key; none of them was used.",
        ) from error


# y of the points of Ed25519 whose order divides 8 (RFC 8032, 5.1), and a multiple of the prime
# more: with such a key, one signature fits any message.
_PRIME = 2**255 - 19
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset((0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8))


def _check_ed25519(key: bytes) -> None:
    y = int.from_bytes(key, "little") & (2**255 - 1)  # without the sign of x
    if y % _PRIME in _SMALL_ORDER:
        raise WireError("public keys: the field signing is no usable Ed25519 key.")


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a participant.

    Attributes:
        curve: X25519 of the link, 32 bytes.
        signing: Ed25519, 32 bytes.
        sealing: X-Wing, 1,216 bytes.
    """

    curve: bytes
    signing: bytes
    sealing: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """32 hex digits of the SHA-256 of the signing key, for comparison by people."""
        return fingerprint_of(self.signing)

    def to_fields(self) -> dict[str, bytes]:
        """Return the keys as named fields."""
        return {"curve": self.curve, "signing": self.signing, "sealing": self.sealing}

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Read keys from outside; every one is checked for use.

        Raises:
            WireError: a field is missing, of the wrong length, or no valid key.
        """
        if not isinstance(fields, Mapping):
            raise WireError(f"public keys: expected named fields, got {type(fields).__name__}.")
        keys = cls(
            _key_field(fields, "curve", CURVE_BYTES),
            _key_field(fields, "signing", SIGNING_BYTES),
            _key_field(fields, "sealing", SEALING_BYTES),
        )
        _check_x25519(keys.curve, "curve")
        _check_ed25519(keys.signing)
        keys._check_sealing()
        return keys

    @classmethod
    def for_sealing(cls, sealing: bytes) -> Self:
        """Return keys of which only the one for sealing is known, checked for use.

        Raises:
            WireError: it is no X-Wing key.
        """
        keys = cls(curve=b"", signing=b"", sealing=sealing)
        keys._check_sealing()
        return keys

    def _check_sealing(self) -> None:
        _check_x25519(self.sealing[_MLKEM_PUBLIC_BYTES:], "sealing")
        _ = self.sealing_key

    @cached_property
    def sealing_key(self) -> MLKEM768X25519PublicKey:
        """The X-Wing key for HPKE, made once.

        Raises:
            WireError: the bytes are no such key.
        """
        try:
            return MLKEM768X25519PublicKey(
                MLKEM768PublicKey.from_public_bytes(self.sealing[:_MLKEM_PUBLIC_BYTES]),
                X25519PublicKey.from_public_bytes(self.sealing[_MLKEM_PUBLIC_BYTES:]),
            )
        except ValueError as error:
            raise WireError("public keys: 'sealing' is not an X-Wing key.") from error


def _key_field(fields: Mapping[object, object], name: str, length: int) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes) or len(value) != length:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise WireError(f"public keys: expected {name!r} of {length} bytes, got {got}.")
    return value


def _check_x25519(key: bytes, name: str) -> None:
    """Refuse the few points that make every shared secret zero."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise WireError(f"public keys: {name!r} holds an X25519 key of low order.") from error


class Secret:
    """Base of classes that hold secrets: it cannot be pickled, to another process or a file."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds secrets and is never pickled.")


class PrivateKeys(Secret):
    """The three key pairs of a participant. The repr shows the fingerprint only.

    Attributes:
        public: the public halves.
    """

    def __init__(self, *, curve: bytes, signing: bytes, sealing: bytes) -> None:
        self._curve = curve
        self._signing = signing
        self._sealing = sealing
        self._signer = Ed25519PrivateKey.from_private_bytes(signing)
        # X-Wing: one 32-byte seed gives both of its keys.
        seed = hashlib.shake_256(sealing).digest(_MLKEM_SEED_BYTES + 32)
        mlkem = MLKEM768PrivateKey.from_seed_bytes(seed[:_MLKEM_SEED_BYTES])
        x25519 = X25519PrivateKey.from_private_bytes(seed[_MLKEM_SEED_BYTES:])
        self._opener = MLKEM768X25519PrivateKey(mlkem, x25519)
        self.public = PublicKeys(
            curve=X25519PrivateKey.from_private_bytes(curve).public_key().public_bytes_raw(),
            signing=self._signer.public_key().public_bytes_raw(),
            sealing=mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw(),
        )

    def __repr__(self) -> str:
        return f"PrivateKeys({self.public.fingerprint})"

    @classmethod
    def generate(cls, *, curve: bytes | None = None) -> Self:
        """Draw new keys from the operating system's generator; a given link key is kept."""
        return cls(
            curve=curve or os.urandom(SECRET_BYTES),
            signing=os.urandom(SECRET_BYTES),
            sealing=os.urandom(SECRET_BYTES),
        )

    @classmethod
    def derive(cls, secret: bytes, purpose: bytes) -> Self:
        """Derive keys from a secret (HKDF-SHA256): the same for the same secret and purpose."""
        made = HKDF(SHA256(), 3 * SECRET_BYTES, salt=None, info=purpose).derive(secret)
        curve, signing, sealing = (
            made[i * SECRET_BYTES : (i + 1) * SECRET_BYTES] for i in range(3)
        )
        return cls(curve=curve, signing=signing, sealing=sealing)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            KeyFileError: it is missing, damaged, of another kind, or readable by others.
            StorageError: the system cannot read it.
        """
        secrets, check = load_secrets(path, "fcil-private-keys", ("curve", "signing", "sealing"))
        keys = cls(**secrets)
        check_checksum(path, check, keys._check())
        return keys

    @classmethod
    def load_or_new(cls, path: Path) -> Self:
        """Return the keys of a file, which the first call creates with new ones.

        Raises:
            KeyFileError, StorageError: as in `load` and `save`.
        """
        if path.exists():
            return cls.load(path)
        keys = cls.generate()
        keys.save(path)
        return keys

    def save(self, path: Path) -> None:
        """Write a key file, 0600 from the first moment.

        Raises:
            StorageError: the file could not be written.
        """
        secrets = {"curve": self._curve, "signing": self._signing, "sealing": self._sealing}
        save_secrets(path, "fcil-private-keys", secrets, self._check())

    def _check(self) -> str:
        public = self.public
        return hashlib.sha256(public.curve + public.signing + public.sealing).hexdigest()

    @property
    def curve_secret(self) -> bytes:
        """The 32-byte secret of the link; only for the transport."""
        return self._curve

    @property
    def opener(self) -> MLKEM768X25519PrivateKey:
        """The X-Wing private key for HPKE; only for the envelope."""
        return self._opener

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of data for one purpose (one word)."""
        return self._signer.sign(signed_form(purpose, data))
