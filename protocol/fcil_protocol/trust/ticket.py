"""Tickets: short texts that each admit one new client, once.

A ticket names the server (addresses and CURVE key), the federation (digest of its root key) and a
secret of 16 bytes. The keys of a *guest* are derived from the secret: with its CURVE key the new
client passes the gate, with its signing key it signs the one message that it may send. The server
keeps only the guest's public keys, so a thief of its disk cannot use open tickets.

The text is ``FCIL1`` and base32, so that it can be typed without regard to case and fits the
alphanumeric mode of a QR code::

    version 1 | server CURVE key 32 | federation 16 | secret 16 | expires 4 | addresses | check 4

Version 2 has one byte of flags after the version: 1, the key and the addresses are a relay's, which
leads to the federation's server; 2, the ticket is for a new relay.

``addresses`` are comma-separated ``HOST:PORT``; ``check`` is the beginning of the SHA-256 of
everything before it. A reader sees the expiry, but only the server's clock decides on it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Self

from fcil_protocol.errors import BadTicket
from fcil_protocol.ids import FederationId
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.trust.keys import CURVE_BYTES, PrivateKeys, PublicKeys, Secret

PREFIX = "FCIL1"
SECRET_TICKET_BYTES = 16
MAX_TICKET_CHARS = 600
MAX_ADDRESSES = 4
PROOF = "enrol"  # purpose of the signature over `proof_text`
_HEAD = struct.Struct(f">{CURVE_BYTES}s16s{SECRET_TICKET_BYTES}sI")
_VIA, _RELAY = 1, 2  # flags
_CHECK_BYTES = 4
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")


@dataclass(frozen=True)
class Ticket(Secret):
    """An invitation for one client. The repr does not show the secret.

    Attributes:
        server_key: CURVE public key of the server, or of the relay, 32 bytes.
        federation: digest of the root key that must have certified the server.
        secret: 16 random bytes, for one client and one use.
        expires: unix seconds by the server's clock.
        addresses: ``HOST:PORT`` in the order of attempts.
        via: key and addresses are those of a relay.
        relay: it admits a new relay, not a client.
    """

    server_key: bytes
    federation: FederationId
    secret: bytes = field(repr=False)
    expires: int
    addresses: tuple[str, ...]
    via: bool = False
    relay: bool = False

    @classmethod
    def new(
        cls,
        server_key: bytes,
        federation: FederationId,
        addresses: tuple[str, ...],
        lasts_s: float,
        *,
        via: bool = False,
        relay: bool = False,
    ) -> Self:
        """Draw a ticket that is valid for ``lasts_s`` seconds from now.

        Raises:
            BadTicket: an address is invalid, or they are too long together.
        """
        _check_addresses(addresses)
        secret = os.urandom(SECRET_TICKET_BYTES)
        expires = int(time.time() + lasts_s)
        ticket = cls(server_key, federation, secret, expires, addresses, via, relay)
        if (size := len(ticket.to_text())) > MAX_TICKET_CHARS:
            raise BadTicket(
                f"a ticket has at most {MAX_TICKET_CHARS} characters, and {size} with the "
                f"addresses {', '.join(addresses)[:200]}.",
                action="Shorten `[federation] advertise` on the server.",
            )
        return ticket

    def guest_keys(self) -> PrivateKeys:
        """Return the keys that admit the holder at the gate and sign its request."""
        return PrivateKeys.derive(self.secret, b"fcil/1/ticket" + self.server_key)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the guest's CURVE key (hex), by which a member's record names its ticket."""
        return hashlib.sha256(self.guest_keys().public.curve).hexdigest()

    def to_text(self) -> str:
        """Return the ticket as one line."""
        flags = _VIA * self.via + _RELAY * self.relay
        form = bytes([2, flags]) if flags else bytes([1])  # without flags, older programs read it
        head = form + _HEAD.pack(
            self.server_key, bytes.fromhex(self.federation), self.secret, self.expires
        )
        body = head + ",".join(self.addresses).encode("ascii")
        text = base64.b32encode(body + _check(body)).decode("ascii").rstrip("=")
        return PREFIX + text

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a ticket; spaces and line breaks in it do not matter.

        Raises:
            BadTicket: it is no ticket, was truncated, or a character differs.
        """
        packed = "".join(text.split()).upper()
        if not packed.startswith(PREFIX) or len(packed) > MAX_TICKET_CHARS:
            raise BadTicket(
                f"expected a ticket, one line that begins with {PREFIX}, got {len(text)} "
                "characters of something else.",
                action="Give the file that `fcil-server enrol` wrote, or its one line.",
            )
        coded = packed.removeprefix(PREFIX)
        try:
            body = base64.b32decode(coded + "=" * (-len(coded) % 8))
        except ValueError:
            body = b""
        body, check = body[:-_CHECK_BYTES], body[-_CHECK_BYTES:]
        if len(body) < 2 + _HEAD.size or _check(body) != check:
            raise BadTicket(
                "the ticket was altered or cut short: its check digits do not match.",
                action="Copy the whole line again, or ask for a new ticket.",
            )
        version, flags = body[0], body[1] if body[0] == 2 else 0
        if version not in (1, 2) or flags > _VIA + _RELAY:
            raise BadTicket(
                f"the ticket has format {version}.{flags}; this program reads formats 1 and 2.",
                action="Install the fcil version of the server.",
            )
        body = body[version:]  # as many bytes as the version's number
        server_key, federation, secret, expires = _HEAD.unpack(body[: _HEAD.size])
        try:
            addresses = tuple(body[_HEAD.size :].decode("ascii").split(","))
        except UnicodeDecodeError:
            addresses = ()
        _check_addresses(addresses)
        via, relay = bool(flags & _VIA), bool(flags & _RELAY)
        home = FederationId(federation.hex())
        return cls(server_key, home, secret, expires, addresses, via, relay)


def proof_text(guest_key: bytes, keys: PublicKeys) -> bytes:
    """Return the bytes that a new member's signing key signs: its keys, for this ticket only."""
    return guest_key + keys.curve + keys.signing + keys.sealing


def keys_digest(keys: PublicKeys) -> str:
    """Return the digest that an Ack of new keys names: SHA-256 of all three (hex)."""
    return hashlib.sha256(keys.curve + keys.signing + keys.sealing).hexdigest()


def read_ticket(source: Path, stdin: BinaryIO) -> Ticket:
    """Read a ticket from a file, or from standard input when ``source`` is ``-``.

    Never from a command's arguments: every user of a machine can read those.

    Raises:
        BadTicket: it holds no ticket. StorageError: it cannot be read.
    """
    if str(source) == "-":
        data = stdin.read(4 * MAX_TICKET_CHARS)
    else:
        with storage_errors("read", source), source.open("rb") as file:
            data = file.read(4 * MAX_TICKET_CHARS)
    return Ticket.from_text(data.decode("ascii", errors="replace"))


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"fcil/1/ticket" + body).digest()[:_CHECK_BYTES]


def check_address(address: str, action: str) -> None:
    """Check that an address has the form that a ticket requires.

    Raises:
        BadTicket: it is no HOST:PORT with a valid port; ``action`` is the remedy in the error.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadTicket(f"expected an address HOST:PORT, got {address[:80]!r}.", action=action)


def _check_addresses(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        check_address(address, "Correct `[federation] advertise` on the server.")
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise BadTicket(
            f"a ticket names 1 to {MAX_ADDRESSES} addresses, got {len(addresses)}.",
            action="Shorten `[federation] advertise` on the server.",
        )
