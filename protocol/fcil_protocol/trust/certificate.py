"""The root key of a federation, and its certificate for the server's keys.

The root key of a federation certifies the server's keys, so that they can be changed; the
federation's name is the digest of the root key.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fcil_protocol.errors import TrustError, WrongClock, WrongFederation
from fcil_protocol.formats import day
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.canonical import Fields, pack_map
from fcil_protocol.trust.key_file import SECRET_BYTES, check_checksum, load_secrets, save_secrets
from fcil_protocol.trust.keys import (
    SIGNATURE_BYTES,
    SIGNING_BYTES,
    PublicKeys,
    Secret,
    fingerprint_of,
    signed_form,
    verify_signature,
)

MAX_CERTIFICATE_BYTES = 4096  # one has about 1,500
_CLOCK_MARGIN_S = 86_400  # a certificate is valid for clocks that are a day behind
_DAY_S = 86_400
_MAX_SECONDS = 2**40
_CERTIFICATE = "certificate"


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
        secrets, check = load_secrets(path, "fcil-root-key", ("signing",))
        root = cls(secrets["signing"])
        check_checksum(path, check, hashlib.sha256(root.public).hexdigest())
        return root

    def save(self, path: Path) -> None:
        """Write a root key file, 0600 from the first moment."""
        check = hashlib.sha256(self.public).hexdigest()
        save_secrets(path, "fcil-root-key", {"signing": self._secret}, check)

    @property
    def federation(self) -> FederationId:
        """The federation's name: 32 hex digits of the SHA-256 of the public root key."""
        return FederationId(fingerprint_of(self.public))

    def certify(self, server: PublicKeys, *, valid_days: int = 3650, after: int = 0) -> Certificate:
        """Certify a server's keys from yesterday on for ``valid_days`` days.

        The serial number is the time in milliseconds, or the successor of ``after``, the previous
        certificate's serial, on a clock that was set back.
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
        return Certificate(body, self._signer.sign(signed_form(_CERTIFICATE, body)))


@dataclass(frozen=True)
class Certificate:
    """A federation's signed statement of its server's keys. Trust no field before `verify`.

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
        """Read the fields from the body, so that they always match the signed bytes."""
        fields = Fields(self.body, "certificate", max_bytes=MAX_CERTIFICATE_BYTES)
        root = fields.binary("root", SIGNING_BYTES)
        for name, value in (
            ("root", root),
            ("federation", FederationId(fingerprint_of(root))),
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
        """Parse a certificate; its content is not verified yet.

        Raises:
            TooLarge, WireError: with what was expected and got.
        """
        fields = Fields(data, "certificate", max_bytes=MAX_CERTIFICATE_BYTES)
        return cls(fields.binary("body"), fields.binary("signature", SIGNATURE_BYTES))

    def verify(self, federation: FederationId, now: float) -> PublicKeys:
        """Return the server's keys if this federation's root key certifies them now.

        Args:
            federation: this side's federation; it pins the root key.
            now: unix seconds.

        Raises:
            WrongFederation: it belongs to another federation.
            BadSignature: it was altered.
            WrongClock: it is not valid yet, or no longer; everything else in it is valid.
        """
        if self.federation != federation:
            raise WrongFederation(
                f"the server belongs to federation {self.federation}, expected {federation}.",
                action="Join that federation, or correct the server's address.",
            )
        verify_signature(self.root, _CERTIFICATE, self.body, self.signature)
        if not self.not_before <= now <= self.not_after:
            raise WrongClock(
                f"the server's certificate is valid from {day(self.not_before)} to "
                f"{day(self.not_after)}, but this clock says {day(now)}.",
                action="Set the clock; if it is right, the server needs a new certificate.",
            )
        return self.keys

    def refuse_older(self, known: Certificate) -> None:
        """Refuse a certificate older than one seen before.

        Raises:
            TrustError: this one is older.
        """
        if self.serial < known.serial:
            raise TrustError(
                f"the server presents its certificate {self.serial}, but the later one "
                f"{known.serial} is known here.",
                action="Its keys were replaced since: a copy of the old ones is in use somewhere.",
            )
