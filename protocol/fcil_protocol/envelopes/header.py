"""The header of an envelope: its content, its recipient, and the hash of each of its chunks.

Two layers, each encoded once and never again: the *core* describes the payload and is bound into
its encryption; the *header* embeds the core's bytes and adds sizes and the SHA-256 of every chunk
of the sealed bytes. The sender signs the header's bytes. Order of reading: length, form, protocol
version, limits, consistency.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Self, cast

from fcil_protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from fcil_protocol.errors import TooLarge, VersionMismatch, WireError
from fcil_protocol.ids import FederationId, UpdateId
from fcil_protocol.trust.canonical import Fields, pack_map, unhex

MAX_CORE_BYTES = 2048
MAX_HEADER_BYTES = 9 << 18  # 32 bytes per chunk: 1 GiB in chunks of 16 KiB
MIN_CHUNK_BYTES = 16 << 10
MAX_CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
USUAL_CHUNK_BYTES = 32 << 10  # 1.6 s at 20 kB/s: little is lost with a connection
_USUAL_CHUNKS = 4096  # beyond this, chunks grow instead: their hashes travel with the header

# Overhead of the chunked AEAD (C2SP chunked-encryption): 24 bytes of nonce and 32 of key
# commitment, then a 16-byte tag for each block; the last block is never full.
AEAD_BLOCK_BYTES = 16 << 10
_AEAD_FIXED_BYTES = 56
_AEAD_TAG_BYTES = 16

_MAX_NAME = 128
_MAX_INDEX = 2**31 - 1
_MAX_COUNT = 2**53
_SCHEMA_BYTES = (0, 32)  # none for payloads without a schema
_DIGEST_HALF_BYTES = 16

Direction = Literal["update", "broadcast"]
Recipient = Literal["server", "client"]
_RECIPIENT_OF = {"update": "server", "broadcast": "client"}
SERVER = "server"


def sealed_size(plain_bytes: int) -> int:
    """Return the exact size of a payload once sealed, in bytes."""
    blocks = plain_bytes // AEAD_BLOCK_BYTES + 1
    return plain_bytes + _AEAD_FIXED_BYTES + _AEAD_TAG_BYTES * blocks


def chunk_bytes_for(sealed_bytes: int) -> int:
    """Return the chunk size for a sealed payload of this size."""
    chunk_bytes = USUAL_CHUNK_BYTES
    while chunk_bytes < MAX_CHUNK_BYTES and sealed_bytes > chunk_bytes * _USUAL_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


@dataclass(frozen=True)
class Core:
    """Description of a sealed payload; authenticated, not secret.

    Attributes:
        federation: 32 hex digits.
        direction, recipient: ``update`` to ``server``, or ``broadcast`` to ``client``.
        sender: client id, or ``server``.
        sender_key: fingerprint of the sender's signing key.
        method: name of the method.
        schema: digest of the payload's schema in hex, empty if it has none.
        task, round: -1 if there is none.
        base: number of the state that an update starts from, or that a part leads to.
        part: name of a broadcast's part.
    """

    protocol: int
    federation: FederationId
    run: str
    direction: Direction
    sender: str
    sender_key: str
    recipient: Recipient
    method: str
    schema: str
    task: int
    round: int
    kind: str
    base: int
    part: str = ""

    def to_bytes(self) -> bytes:
        """Encode the core. Names are short and digests raw: the core travels with every update.

        Raises:
            WireError: a field has a value that a receiver would refuse.
        """
        fields: dict[str, object] = {
            "v": self.protocol,
            "fed": unhex(self.federation, _DIGEST_HALF_BYTES, "core, federation"),
            "run": self.run,
            "dir": self.direction,
            "from": self.sender,
            "key": unhex(self.sender_key, _DIGEST_HALF_BYTES, "core, sender_key"),
            "to": self.recipient,
            "meth": self.method,
            "sch": unhex(self.schema, len(self.schema) // 2, "core, schema"),
            "task": self.task,
            "rnd": self.round,
            "kind": self.kind,
            "base": self.base,
        }
        if self.part:
            fields["part"] = self.part
        data = pack_map(fields)
        checked = Core.from_bytes(data)
        assert checked == self, "a core is read as it was written"
        return data

    @classmethod
    @lru_cache(maxsize=64)  # the same core is parsed on arrival, when checked, and when opened
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a core from outside.

        Raises:
            VersionMismatch: its protocol version is not supported here.
            TooLarge, WireError: with what was expected and got.
        """
        fields = Fields(data, "core", max_bytes=MAX_CORE_BYTES)
        protocol = fields.integer("v", 0, _MAX_INDEX)
        if not OLDEST_PROTOCOL_VERSION <= protocol <= PROTOCOL_VERSION:
            raise VersionMismatch(
                f"an envelope has protocol version {protocol}, expected "
                f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}.",
                action="Install the same fcil version on both sides.",
            )
        direction, sender = fields.text("dir", 16), fields.text("from", 64)
        recipient = fields.text("to", 16)
        if _RECIPIENT_OF.get(direction) != recipient:
            raise WireError(
                f"core: {direction[:16]!r} to {recipient[:16]!r} is not a valid direction."
            )
        if (sender == SERVER) != (recipient == "client"):
            raise WireError(f"core: sender {sender!r} of a {direction} to {recipient!r}.")
        return cls(
            protocol=protocol,
            federation=FederationId(fields.binary("fed", _DIGEST_HALF_BYTES).hex()),
            run=fields.text("run", _MAX_NAME),
            direction=cast(Direction, direction),
            sender=sender,
            sender_key=fields.binary("key", _DIGEST_HALF_BYTES).hex(),
            recipient=cast(Recipient, recipient),
            method=fields.text("meth", _MAX_NAME),
            schema=fields.binary("sch", *_SCHEMA_BYTES).hex(),
            task=fields.integer("task", -1, _MAX_INDEX),
            round=fields.integer("rnd", -1, _MAX_INDEX),
            kind=fields.text("kind", _MAX_NAME),
            base=fields.integer("base", -1, _MAX_COUNT),
            part=fields.text("part", _MAX_NAME, default=""),
        )


@dataclass(frozen=True)
class Header:
    """A parsed header. Its fields mean nothing before its signature was verified.

    Attributes:
        core: description of the payload.
        core_bytes: the core as received; bound into the encryption.
        sealed_bytes, plain_bytes: sizes of the payload, sealed and opened.
        chunk_bytes: size of every chunk but the last.
        hashes: SHA-256 of each chunk of the sealed bytes.
        update_id: SHA-256 of the header's bytes (hex); the envelope's name.
    """

    core: Core
    core_bytes: bytes = field(repr=False)
    sealed_bytes: int
    plain_bytes: int
    chunk_bytes: int
    hashes: tuple[bytes, ...] = field(repr=False)
    update_id: UpdateId

    def chunk_size(self, index: int) -> int:
        """Return the size of one chunk in bytes."""
        return min(self.chunk_bytes, self.sealed_bytes - index * self.chunk_bytes)

    def extent(self, chunks: range) -> slice:
        """Return the position of consecutive chunks in the sealed body."""
        return slice(chunks.start * self.chunk_bytes, chunks.stop * self.chunk_bytes)

    def split(self, body: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """Yield the chunks of a sealed body, without copying."""
        view = memoryview(body)
        for index in range(len(self.hashes)):
            start = index * self.chunk_bytes
            yield view[start : start + self.chunk_size(index)]

    def fits(self, index: int, data: bytes | memoryview) -> bool:
        """Return True if data is the chunk with this number."""
        return hashlib.sha256(data).digest() == self.hashes[index]


def header_with(
    core_bytes: bytes, hashes: bytes, sealed_bytes: int, plain_bytes: int, chunk_bytes: int
) -> bytes:
    """Encode the header of a sealed body with these concatenated chunk hashes."""
    return pack_map(
        {
            "core": core_bytes,
            "sealed": sealed_bytes,
            "plain": plain_bytes,
            "chunk": chunk_bytes,
            "hashes": hashes,
        }
    )


def parse_header(data: bytes, *, max_plain_bytes: int) -> Header:
    """Parse a header from outside; does not verify its signature.

    Args:
        data: the header as received.
        max_plain_bytes: largest payload accepted here.

    Raises:
        TooLarge: the header or the payload exceeds the limit.
        VersionMismatch: its protocol version is not supported here.
        WireError: it is malformed or contradicts itself.
    """
    chunks = -(-sealed_size(max_plain_bytes) // MIN_CHUNK_BYTES)
    limit = min(MAX_HEADER_BYTES, MAX_CORE_BYTES + 256 + chunks * HASH_BYTES)
    fields = Fields(data, "header", max_bytes=limit)
    core_bytes = fields.binary("core")
    core = Core.from_bytes(core_bytes)
    plain_bytes = fields.integer("plain", 0, _MAX_COUNT)
    if plain_bytes > max_plain_bytes:
        raise TooLarge(
            f"a payload of {plain_bytes} bytes exceeds the limit of {max_plain_bytes}.",
            action="Check that both sides run the same method version and configuration.",
        )
    sealed_bytes = fields.integer("sealed", 0, 2 * _MAX_COUNT)
    if sealed_bytes != sealed_size(plain_bytes):
        raise WireError(
            f"header: {plain_bytes} bytes become {sealed_size(plain_bytes)} bytes when sealed, "
            f"got {sealed_bytes}."
        )
    chunk_bytes = fields.integer("chunk", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    count = -(-sealed_bytes // chunk_bytes)
    hashes = fields.binary("hashes", count * HASH_BYTES)
    return Header(
        core=core,
        core_bytes=core_bytes,
        sealed_bytes=sealed_bytes,
        plain_bytes=plain_bytes,
        chunk_bytes=chunk_bytes,
        hashes=tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)),
        update_id=UpdateId(hashlib.sha256(data).hexdigest()),
    )


def core_of(header: bytes) -> Core:
    """Return the core of a header whose sizes are checked elsewhere.

    Raises:
        TooLarge, VersionMismatch, WireError: as in `parse_header`.
    """
    fields = Fields(header, "header", max_bytes=MAX_HEADER_BYTES)
    return Core.from_bytes(fields.binary("core"))
