"""A sealed envelope at rest: one form for the outbox, the parts and the spool.

    magic 7, version 1, sizes of the four pieces (header 4, signature 2, wrap 2, body 8),
    SHA-256 of all before it and of header, signature and wrap,
    header, signature, wrap, body

The body needs no further hash: the header lists the SHA-256 of each of its chunks.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fcil_protocol.errors import CorruptFile
from fcil_protocol.files import read_at, storage_errors, write_atomic
from fcil_protocol.header import MAX_HEADER_BYTES, parse_header

_MAGIC = b"fcilenv"
_VERSION = 1
_SIZES = struct.Struct("<7sBIHHQ")
_PREAMBLE_BYTES = _SIZES.size + 32
_ANY_SIZE = 1 << 40  # the file's own size is the limit


@dataclass(frozen=True)
class StoredEnvelope:
    """A complete envelope: what is sent, and the content key wrapped for one recipient."""

    header: bytes
    signature: bytes
    wrap: bytes
    body: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Encode for storage."""
        small = self.header + self.signature + self.wrap
        sizes = _SIZES.pack(
            _MAGIC, _VERSION,
            len(self.header), len(self.signature), len(self.wrap), len(self.body),
        )  # fmt: skip
        return b"".join((sizes, hashlib.sha256(sizes + small).digest(), small, self.body))

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "a stored envelope") -> Self:
        """Decode what was stored.

        The body's own bytes are not hashed again here: whoever kept ``data`` has checked
        them, and the AEAD does when the envelope is opened.

        Raises:
            CorruptFile: the form, the sizes or the hash do not fit.
        """
        lengths = _lengths(data, len(data), where)
        small_bytes = sum(lengths[:3])
        return cls(*_pieces(data, lengths, where), data[_PREAMBLE_BYTES + small_bytes :])


def _lengths(data: bytes, total_bytes: int, where: str) -> tuple[int, int, int, int]:
    """Return the sizes of the four pieces; ``data`` holds the preamble at least."""
    if len(data) < _PREAMBLE_BYTES:
        raise _damaged(where, f"expected {_PREAMBLE_BYTES} bytes and more, got {total_bytes}")
    magic, version, *lengths = _SIZES.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise _damaged(where, f"expected {_MAGIC!r} {_VERSION}, got {magic!r} {version}")
    header, signature, wrap, body = lengths
    expected = _PREAMBLE_BYTES + header + signature + wrap + body
    if expected != total_bytes or header > MAX_HEADER_BYTES:
        raise _damaged(where, f"expected {expected} bytes, got {total_bytes}")
    return header, signature, wrap, body


def _pieces(
    data: bytes, lengths: tuple[int, int, int, int], where: str
) -> tuple[bytes, bytes, bytes]:
    """Return header, signature and wrap if their hash fits."""
    header, signature, wrap, _ = lengths
    small = data[_PREAMBLE_BYTES : _PREAMBLE_BYTES + header + signature + wrap]
    digest = hashlib.sha256(data[: _SIZES.size] + small).digest()
    if digest != data[_SIZES.size : _PREAMBLE_BYTES]:
        raise _damaged(where, "its checksum does not fit")
    return small[:header], small[header : header + signature], small[header + signature :]


def _damaged(where: str, how: str) -> CorruptFile:
    return CorruptFile(f"{where} is damaged: {how}.", action="It was not used.")


def write_envelope(path: Path, envelope: StoredEnvelope) -> None:
    """Write an envelope file; it is on disk, whole, when this returns.

    Raises:
        DiskFull, StorageError: nothing was changed.
    """
    write_atomic(path, envelope.to_bytes())


def read_envelope(path: Path) -> StoredEnvelope:
    """Read an envelope file and check every byte of it.

    Raises:
        CorruptFile: it was altered or cut.
        StorageError: it cannot be read.
    """
    where = str(path)
    with storage_errors("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            total = os.fstat(fd).st_size
            lengths = _lengths(read_at(fd, 0, _PREAMBLE_BYTES), total, where)
            start = _PREAMBLE_BYTES + sum(lengths[:3])
            pieces = _pieces(read_at(fd, 0, start), lengths, where)
            envelope = StoredEnvelope(*pieces, read_at(fd, start, lengths[3]))
        finally:
            os.close(fd)
    _check_body(envelope, where)
    return envelope


def _check_body(envelope: StoredEnvelope, where: str) -> None:
    header = parse_header(envelope.header, max_plain_bytes=_ANY_SIZE)
    if len(envelope.body) != header.sealed_bytes:
        raise _damaged(where, f"expected {header.sealed_bytes} sealed bytes")
    for index, chunk in enumerate(header.split(envelope.body)):
        if not header.fits(index, chunk):
            raise _damaged(where, f"chunk {index} of {len(header.hashes)} was altered")
