"""Seal and open payloads; the only module that calls a cipher.

    seal:  key    = 32 random bytes
           body   = Cobblestone256(key, "fcil/1/body" NUL SHA-256(core), payload)
           header = {core, sizes, SHA-256 of each chunk of body}
           sig    = Ed25519(sender, "fcil/1/envelope" NUL header)
           wrap   = HPKE X-Wing(recipient, info = "fcil/1/wrap" NUL SHA-256(header)
                                                  fingerprint of the recipient, key)
    open:  sig, then each chunk against its hash, then wrap, then body to its end

A key encrypts one body, so no nonce can repeat. No piece fits another message: the body is bound to
its core, the header holds the core and the hashes of the body, the signature covers the header, and
the wrap names header and recipient. HPKE's base mode does not authenticate the sender: the
signature does. No plaintext is returned before the last tag is verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.cobblestone import Cobblestone256Decryptor, Cobblestone256Encryptor
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from fcil_protocol.envelopes.header import (
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MIN_CHUNK_BYTES,
    Core,
    Header,
    chunk_bytes_for,
    core_of,
    header_with,
    parse_header,
    sealed_size,
)
from fcil_protocol.envelopes.stored_envelope import (
    Body,
    StoredEnvelope,
    read_envelope,
    write_envelope,
)
from fcil_protocol.errors import BadSignature, CannotOpen, TooLarge, TrustError
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, Secret, verify_signature

__all__ = [
    "WRAP_BYTES",
    "ContentKey",
    "Core",
    "Header",
    "Sealed",
    "StoredEnvelope",
    "open_body",
    "open_to",
    "parse_header",
    "read_envelope",
    "seal",
    "sealed_size",
    "unwrap_key",
    "verify_header",
    "wrap_key",
    "write_envelope",
]

KEY_BYTES = 32
WRAP_BYTES = 1168  # 1,120 of X-Wing, the key, a 16-byte tag
PURPOSE = "envelope"
_BODY_TAG = b"fcil/1/body\0"
_WRAP_TAG = b"fcil/1/wrap\0"
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
# The cipher holds the interpreter while it works: one step takes 0.1 ms, and fits a cache.
_STEP_BYTES = 128 << 10
_BUFFERS = bytes | bytearray | memoryview

Plain = bytes | bytearray | memoryview | Sequence[bytes | memoryview]


@dataclass(frozen=True)
class ContentKey(Secret):
    """The key of one body. Its repr does not show it."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class Sealed:
    """An envelope sealed by this side, as sent and stored, for any recipient."""

    header: bytes
    signature: bytes
    body: bytes | bytearray = field(repr=False)

    @cached_property
    def parsed(self) -> Header:
        """The header's content."""
        return parse_header(self.header, max_plain_bytes=len(self.body))

    def chunk(self, index: int) -> memoryview:
        """Return one chunk of the body, without copying."""
        start = index * self.parsed.chunk_bytes
        return memoryview(self.body)[start : start + self.parsed.chunk_size(index)]

    def stored(self, wrap: bytes) -> StoredEnvelope:
        """Return the envelope with its key wrapped for one recipient."""
        return StoredEnvelope(self.header, self.signature, wrap, self.body)


def seal(
    plain: Plain, core: Core, keys: PrivateKeys, *, chunk_bytes: int = 0
) -> tuple[Sealed, ContentKey]:
    """Seal a payload with a fresh key and sign its header.

    Each byte is read once, encrypted into its place, and hashed there.

    Args:
        plain: the payload's bytes, complete or in pieces (`payload.pieces`).
        core: the payload's core; ``sender_key`` must be the fingerprint of ``keys``.
        keys: the sender's.
        chunk_bytes: size of the chunks, each with a hash, 16 KiB to 1 MiB; 0: `chunk_bytes_for`.

    Raises:
        WireError: the core has a value that receivers refuse.
        TooLarge: the header would be larger than a message may be.
    """
    views = [memoryview(plain)] if isinstance(plain, _BUFFERS) else [memoryview(p) for p in plain]
    plain_bytes = sum(map(len, views))
    chunk_bytes = chunk_bytes or chunk_bytes_for(sealed_size(plain_bytes))
    assert MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES, "chunk size out of range"
    assert core.sender_key == keys.public.fingerprint, "sealed with a key other than the one named"
    core_bytes = core.to_bytes()
    key = ContentKey(Cobblestone256Encryptor.generate_key())
    body, hashes = _encrypt(views, key, core_bytes, chunk_bytes)
    header = header_with(core_bytes, hashes, len(body), plain_bytes, chunk_bytes)
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(
            f"a payload of {plain_bytes} bytes in chunks of {chunk_bytes} has a header of "
            f"{len(header)} bytes, more than {MAX_HEADER_BYTES}."
        )
    return Sealed(header, keys.sign(PURPOSE, header), body), key


def _context(core_bytes: bytes) -> bytes:
    return _BODY_TAG + hashlib.sha256(core_bytes).digest()


def _encrypt(
    views: Sequence[memoryview], key: ContentKey, core_bytes: bytes, chunk_bytes: int
) -> tuple[bytearray, bytes]:
    """Return the sealed body, and the concatenated SHA-256 of its chunks."""
    encryptor = Cobblestone256Encryptor(key.value, _context(core_bytes))
    body = bytearray(sealed_size(sum(map(len, views))))
    room, at, hashed, hashes = memoryview(body), 0, 0, bytearray()
    for view in views:
        for start in range(0, len(view), _STEP_BYTES):
            at += encryptor.update_into(view[start : start + _STEP_BYTES], room[at:])
            while at - hashed >= chunk_bytes:  # now, while it is still in the processor's cache
                hashes += hashlib.sha256(room[hashed : hashed + chunk_bytes]).digest()
                hashed += chunk_bytes
    last = encryptor.finalize()
    assert at + len(last) == len(body), "the AEAD's overhead is as documented"
    room[at:] = last
    for start in range(hashed, len(body), chunk_bytes):
        hashes += hashlib.sha256(room[start : start + chunk_bytes]).digest()
    return body, bytes(hashes)


def _info(header: bytes, recipient: PublicKeys) -> bytes:
    return _WRAP_TAG + hashlib.sha256(header).digest() + recipient.fingerprint.encode("ascii")


def wrap_key(key: ContentKey, header: bytes, recipient: PublicKeys) -> bytes:
    """Encrypt a content key for one recipient and one header (1,168 bytes).

    Raises:
        TrustError: the recipient's keys cannot be used.
    """
    try:
        return _SUITE.encrypt(key.value, recipient.sealing_key, _info(header, recipient))
    except ValueError as error:
        raise TrustError(f"nothing can be sealed for {recipient.fingerprint}.") from error


def unwrap_key(wrap: bytes, header: bytes, keys: PrivateKeys) -> ContentKey:
    """Decrypt the content key of a header that was wrapped for these keys.

    Raises:
        CannotOpen: wrapped for another recipient or another header, or damaged.
    """
    try:
        value = _SUITE.decrypt(wrap, keys.opener, _info(header, keys.public))
    except (InvalidTag, ValueError):
        value = b""
    if len(wrap) != WRAP_BYTES or len(value) != KEY_BYTES:
        raise CannotOpen(
            f"a wrapped key of {len(wrap)} bytes (expected {WRAP_BYTES}) does not open with key "
            f"{keys.public.fingerprint} for its header.",
            action="It was made for another recipient or message, or was damaged.",
        )
    return ContentKey(value)


def verify_header(header: bytes, signature: bytes, signer: PublicKeys) -> None:
    """Check that this participant signed the header and is named in it.

    Raises:
        BadSignature: it did not, or the header names another key.
        TooLarge, VersionMismatch, WireError: the bytes are no header.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}.")
    verify_signature(signer.signing, PURPOSE, header, signature)
    named = core_of(header).sender_key
    if named != signer.fingerprint:
        raise BadSignature(f"a header names key {named} but is signed by {signer.fingerprint}.")


def open_body(header: Header, key: ContentKey, chunks: Iterable[Body]) -> memoryview:
    """Decrypt a sealed body, piece by piece in order.

    Returns:
        the payload's bytes; none are released unless all are authentic.

    Raises:
        CannotOpen: altered, truncated, too long, or sealed with another key or core.
    """
    room, at = memoryview(bytearray(header.plain_bytes)), 0  # what grows would be copied as it does

    def put(piece: bytes) -> None:
        nonlocal at
        room[at : at + len(piece)] = piece
        at += len(piece)

    open_to(header, key, chunks, put)
    return room.toreadonly()


def open_to(
    header: Header,
    key: ContentKey,
    chunks: Iterable[Body],
    write: Callable[[bytes], object],
) -> None:
    """Decrypt a sealed body to a destination, such as memory shared with a worker.

    Args:
        header: the envelope's.
        key: the body's.
        chunks: of the body, in order.
        write: receives the payload piece by piece, never more than the header announces. No piece
            may be used before this returns.

    Raises:
        CannotOpen: altered, truncated, too long, or sealed with another key or core.
    """
    decryptor = Cobblestone256Decryptor(key.value, _context(header.core_bytes))
    got = opened = 0
    try:
        for chunk in chunks:
            got += len(chunk)
            if got > header.sealed_bytes:
                raise _altered(header, f"more than {header.sealed_bytes} bytes")
            plain = decryptor.update(chunk)
            opened += len(plain)
            if opened > header.plain_bytes:
                raise _altered(header, f"more than {header.plain_bytes} bytes inside")
            write(plain)
        if got != header.sealed_bytes:
            raise _altered(header, f"{got} of {header.sealed_bytes} bytes")
        plain = decryptor.finalize()
    except InvalidTag as error:
        raise _altered(header, "bytes that its key and core do not authenticate") from error
    opened += len(plain)
    if opened != header.plain_bytes:
        raise _altered(header, f"{opened} bytes inside, expected {header.plain_bytes}")
    write(plain)


def _altered(header: Header, how: str) -> CannotOpen:
    return CannotOpen(
        f"envelope {header.update_id[:16]} cannot be opened: {how}.",
        action="It was altered or belongs to another message; none of it was used.",
    )
