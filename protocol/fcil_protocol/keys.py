"""Keys: who signs, who can open, who may connect; key files; the federation's certificates.

Every participant, client or server, has three key pairs: CURVE (X25519, the link), Ed25519
(signatures) and X-Wing (ML-KEM-768 with X25519, to open what is sealed for it). The root
key of a federation certifies the server's keys, so that they can be changed; the federation's
name is the digest of the root key.

All signatures are over ``fcil/1/<purpose>`` NUL data, so none can serve for another purpose.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fcil_protocol.errors import (
    BadSignature,
    KeyFileError,
    TrustError,
    WireError,
    WrongClock,
    WrongFederation,
)
from fcil_protocol.fields import Fields, pack_map
from fcil_protocol.files import read_private, write_atomic
from fcil_protocol.ids import FederationId

SECRET_BYTES = 32  # of each private key; X-Wing's is its standard seed
CURVE_BYTES = 32
SIGNING_BYTES = 32
SIGNATURE_BYTES = 64
_MLKEM_SEED_BYTES = 64
_MLKEM_PUBLIC_BYTES = 1184
SEALING_BYTES = _MLKEM_PUBLIC_BYTES + 32  # ML-KEM-768, then X25519
FINGERPRINT_DIGITS = 32  # 128 bits of SHA-256
MAX_CERTIFICATE_BYTES = 4096  # one has about 1,500
_CLOCK_MARGIN_S = 86_400  # a certificate is good for clocks that are a day behind
_DAY_S = 86_400
_MAX_SECONDS = 2**40
_CERTIFICATE = "certificate"


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:FINGERPRINT_DIGITS]


def _signed(purpose: str, data: bytes) -> bytes:
    assert purpose.isidentifier(), "a purpose is one word"
    return b"fcil/1/" + purpose.encode("ascii") + b"\0" + data


def verify_signature(public: bytes, purpose: str, data: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature made with `PrivateKeys.sign` for the same purpose.

    Raises:
        BadSignature: it does not fit.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(purpose, data))
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(
            f"the signature of a {purpose} does not fit its {len(data)} bytes and the key "
            f"{_digest(public)}.",
            action="The bytes were altered, or signed by somebody else; nothing was used.",
        ) from error


@dataclass(frozen=True)
class PublicKeys:
    """What others know of a participant.

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
        """32 hex digits of the SHA-256 of the signing key; what people compare."""
        return _digest(self.signing)

    def to_fields(self) -> dict[str, bytes]:
        """Return the keys as named fields."""
        return {"curve": self.curve, "signing": self.signing, "sealing": self.sealing}

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Read keys that come from outside; every one is checked for use.

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
        _check_x25519(keys.sealing[_MLKEM_PUBLIC_BYTES:], "sealing")
        keys.sealing_key()
        return keys

    def sealing_key(self) -> MLKEM768X25519PublicKey:
        """Return the X-Wing key for HPKE.

        Raises:
            WireError: the bytes are no such key.
        """
        try:
            return MLKEM768X25519PublicKey(
                MLKEM768PublicKey.from_public_bytes(self.sealing[:_MLKEM_PUBLIC_BYTES]),
                X25519PublicKey.from_public_bytes(self.sealing[_MLKEM_PUBLIC_BYTES:]),
            )
        except ValueError as error:
            raise WireError(
                f"public keys: 'sealing' of {self.fingerprint} is no X-Wing key."
            ) from error


def _key_field(fields: Mapping[object, object], name: str, length: int) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes) or len(value) != length:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise WireError(f"public keys: expected {name!r} of {length} bytes, got {got}.")
    return value


def _check_x25519(key: bytes, name: str) -> None:
    """Refuse the few points with which every shared secret is zero."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise WireError(f"public keys: {name!r} holds an X25519 key of low order.") from error


class Secret:
    """Base of what holds secrets: it cannot be pickled, to another process or a file."""

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
        """Draw new keys from the operating system's generator; a given link key stays."""
        return cls(
            curve=curve or os.urandom(SECRET_BYTES),
            signing=os.urandom(SECRET_BYTES),
            sealing=os.urandom(SECRET_BYTES),
        )

    @classmethod
    def derive(cls, secret: bytes, purpose: bytes) -> Self:
        """Make keys from a secret (HKDF-SHA256): the same from the same secret and purpose."""
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
        secrets, check = _load(path, "fcil-private-keys", ("curve", "signing", "sealing"))
        keys = cls(**secrets)
        _compare(path, check, keys._check())
        return keys

    def save(self, path: Path) -> None:
        """Write a key file, 0600 from the first moment.

        Raises:
            StorageError: the file could not be written.
        """
        secrets = {"curve": self._curve, "signing": self._signing, "sealing": self._sealing}
        _save(path, "fcil-private-keys", secrets, self._check())

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
        return self._signer.sign(_signed(purpose, data))


class RootKey(Secret):
    """The federation's own key; it certifies servers and signs nothing else."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._signer = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._signer.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"RootKey({self.federation})"

    @classmethod
    def generate(cls) -> Self:
        """Draw a new root key: a new federation."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a root key file; raises like `PrivateKeys.load`."""
        secrets, check = _load(path, "fcil-root-key", ("signing",))
        root = cls(secrets["signing"])
        _compare(path, check, hashlib.sha256(root.public).hexdigest())
        return root

    def save(self, path: Path) -> None:
        """Write a root key file, 0600 from the first moment."""
        check = hashlib.sha256(self.public).hexdigest()
        _save(path, "fcil-root-key", {"signing": self._secret}, check)

    @property
    def federation(self) -> FederationId:
        """The federation's name: 32 hex digits of the SHA-256 of the public root key."""
        return FederationId(_digest(self.public))

    def certify(self, server: PublicKeys, *, valid_days: int = 3650, after: int = 0) -> Certificate:
        """Certify a server's keys from yesterday on for ``valid_days`` days.

        The serial number is the time in milliseconds, or the one that follows ``after``, the
        serial of the certificate before, on a clock that was set back.
        """
        now_s = time.time()
        body = pack_map(
            {
                "root": self.public,
                "keys": server.to_fields(),
                "from": int(now_s) - _CLOCK_MARGIN_S,
                "to": int(now_s) + valid_days * _DAY_S,
                "serial": max(int(now_s * 1000), after + 1),
            }
        )
        return Certificate(body, self._signer.sign(_signed(_CERTIFICATE, body)))


@dataclass(frozen=True)
class Certificate:
    """A federation's word for a server's keys. Believe nothing of it before `verify`.

    Attributes:
        body: the signed bytes, as received; all other fields are read from them.
        signature: by the root key.
        root: public root key; its digest is the federation.
        keys: the server's.
        not_before, not_after: unix seconds.
        serial: a later certificate has a higher one.
    """

    body: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    root: bytes = field(init=False, repr=False)
    federation: FederationId = field(init=False)
    keys: PublicKeys = field(init=False)
    not_before: int = field(init=False)
    not_after: int = field(init=False)
    serial: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the fields from the body, so that they cannot differ from what is signed."""
        fields = Fields(self.body, "certificate", max_bytes=MAX_CERTIFICATE_BYTES)
        root = fields.binary("root", SIGNING_BYTES)
        for name, value in (
            ("root", root),
            ("federation", FederationId(_digest(root))),
            ("keys", PublicKeys.from_fields(fields.get("keys"))),
            ("not_before", fields.integer("from", 0, _MAX_SECONDS)),
            ("not_after", fields.integer("to", 0, _MAX_SECONDS)),
            ("serial", fields.integer("serial", 0, 2**53)),
        ):
            object.__setattr__(self, name, value)

    def to_bytes(self) -> bytes:
        """Encode body and signature."""
        return pack_map({"body": self.body, "signature": self.signature})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a certificate; what it says is not to be trusted yet.

        Raises:
            TooLarge, WireError: with what was expected and got.
        """
        fields = Fields(data, "certificate", max_bytes=MAX_CERTIFICATE_BYTES)
        return cls(fields.binary("body"), fields.binary("signature", SIGNATURE_BYTES))

    def verify(self, federation: FederationId, now: float) -> PublicKeys:
        """Return the server's keys if this federation's root key certifies them now.

        Args:
            federation: the federation that we belong to; it pins the root key.
            now: unix seconds.

        Raises:
            WrongFederation: it belongs to another one.
            BadSignature: it was altered.
            WrongClock: it is not valid yet, or no longer; all else about it is right.
        """
        if self.federation != federation:
            raise WrongFederation(
                f"the server belongs to federation {self.federation}, expected {federation}.",
                action="Join that federation, or correct the server's address.",
            )
        verify_signature(self.root, _CERTIFICATE, self.body, self.signature)
        if not self.not_before <= now <= self.not_after:
            raise WrongClock(
                f"the server's certificate is valid from {_day(self.not_before)} to "
                f"{_day(self.not_after)}, and this clock says {_day(now)}.",
                action="Set the clock; if it is right, the server needs a new certificate.",
            )
        return self.keys

    def must_follow(self, known: Certificate) -> None:
        """Refuse to go back behind a certificate that was seen before.

        Raises:
            TrustError: this one is older.
        """
        if self.serial < known.serial:
            raise TrustError(
                f"the server shows its certificate {self.serial}, and the later one "
                f"{known.serial} is known here.",
                action="Its keys were replaced since: a copy of the old ones is in use somewhere.",
            )


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(min(seconds, 2**37), UTC):%Y-%m-%d}"


def _save(path: Path, kind: str, secrets: Mapping[str, bytes], check: str) -> None:
    fields: dict[str, object] = {"format": kind, "version": 1}
    fields |= {name: base64.b64encode(secret).decode() for name, secret in secrets.items()}
    write_atomic(path, json.dumps({**fields, "check": check}, indent=1).encode() + b"\n")


def _load(path: Path, kind: str, names: tuple[str, ...]) -> tuple[dict[str, bytes], str]:
    """Return the secrets of a key file and the digest of its public keys."""
    data = read_private(path)
    secrets, check = {}, ""
    try:
        fields = json.loads(data)
        found = (fields["format"], fields["version"])
        if found != (kind, 1):
            raise KeyFileError(
                f"{path}: expected format {kind} 1, got {str(found[0])[:40]} {str(found[1])[:9]}.",
                action="Check the path, or use the fcil version that wrote it.",
            )
        check = str(fields["check"])
        secrets = {name: base64.b64decode(fields[name], validate=True) for name in names}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # told below, where it is no context: a JSON error carries the whole document
    if not secrets:
        raise KeyFileError(f"the key file {path} is damaged.", action="Restore it from a backup.")
    _compare(path, [SECRET_BYTES] * len(names), [len(s) for s in secrets.values()])
    return secrets, check


def _compare(path: Path, expected: object, got: object) -> None:
    """Refuse a key file whose secrets are not those it was written with."""
    if expected != got:
        raise KeyFileError(
            f"the key file {path} is damaged: its keys do not match its checksum.",
            action="Restore it from a backup.",
        )
