"""Storage form of a sealed envelope: one for the outbox, the parts and the spool.

    magic 7, version 1, sizes of the four pieces (header 4, signature 2, wrap 2, body 8),
    SHA-256 of everything before it and of header, signature and wrap,
    header, signature, wrap, body

The body needs no further hash: the header lists the SHA-256 of each of its chunks.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from fcil_protocol.envelopes.header import MAX_HEADER_BYTES, Header, parse_header
from fcil_protocol.errors import CorruptFile
from fcil_protocol.storage.atomic_files import FilePart, read_at, storage_errors, write_atomic

_MAGIC = b"fcilenv"
_VERSION = 1
_SIZES = struct.Struct("<7sBIHHQ")
_PREAMBLE_BYTES = _SIZES.size + 32
_ANY_SIZE = 1 << 40  # the file's own size is the limit
_STEP_BYTES = 256 << 10


Body = bytes | bytearray | memoryview


def head_of(header: bytes, signature: bytes, wrap: bytes, body_bytes: int) -> bytes:
    """Encode everything before the body of a stored envelope."""
    small = header + signature + wrap
    sizes = _SIZES.pack(_MAGIC, _VERSION, len(header), len(signature), len(wrap), body_bytes)
    return b"".join((sizes, hashlib.sha256(sizes + small).digest(), small))


@dataclass(frozen=True)
class StoredEnvelope:
    """A complete envelope, with the content key wrapped for one recipient."""

    header: bytes
    signature: bytes
    wrap: bytes
    body: Body = field(repr=False)

    def to_bytes(self) -> bytes:
        """Encode for storage."""
        return b"".join(self.pieces())

    def pieces(self) -> list[Body]:
        """Return the pieces that `to_bytes` joins: the head, and the body itself."""
        return [head_of(self.header, self.signature, self.wrap, len(self.body)), self.body]

    @cached_property
    def parsed(self) -> Header:
        """The header's content."""
        return parse_header(self.header, max_plain_bytes=_ANY_SIZE)

    def view(self, chunks: range) -> memoryview:
        """Return consecutive chunks of the body, without a copy."""
        return memoryview(self.body)[self.parsed.extent(chunks)]

    def read(self, chunks: range) -> bytes:
        """Return consecutive chunks of the body."""
        return bytes(self.view(chunks))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str = "a stored envelope") -> Self:
        """Decode stored bytes; for a memoryview the body is a view.

        The body's own bytes are not hashed again here: the owner of ``data`` has checked
        them, and the AEAD does when the envelope is opened.

        Raises:
            CorruptFile: the form, the sizes or the hash do not fit.
        """
        lengths = _lengths(data, len(data), where)
        small_bytes = sum(lengths[:3])
        return cls(*_pieces(data, lengths, where), data[_PREAMBLE_BYTES + small_bytes :])


def _lengths(data: bytes | memoryview, total_bytes: int, where: str) -> tuple[int, int, int, int]:
    """Return the sizes of the four pieces; ``data`` holds at least the preamble."""
    if len(data) < _PREAMBLE_BYTES:
        raise _damaged(where, f"expected {_PREAMBLE_BYTES} bytes or more, got {len(data)}")
    magic, version, *lengths = _SIZES.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise _damaged(where, f"expected {_MAGIC!r} {_VERSION}, got {magic!r} {version}")
    header, signature, wrap, body = lengths
    expected = _PREAMBLE_BYTES + header + signature + wrap + body
    if expected != total_bytes or header > MAX_HEADER_BYTES:
        raise _damaged(where, f"expected {expected} bytes, got {total_bytes}")
    return header, signature, wrap, body


def _pieces(
    data: bytes | memoryview, lengths: tuple[int, int, int, int], where: str
) -> tuple[bytes, bytes, bytes]:
    """Return header, signature and wrap if their hash fits."""
    header, signature, wrap, _ = lengths
    small = bytes(data[_PREAMBLE_BYTES : _PREAMBLE_BYTES + header + signature + wrap])
    digest = hashlib.sha256(bytes(data[: _SIZES.size]) + small).digest()
    if digest != data[_SIZES.size : _PREAMBLE_BYTES]:
        raise _damaged(where, "its checksum does not match")
    return small[:header], small[header : header + signature], small[header + signature :]


def _damaged(where: str, how: str) -> CorruptFile:
    return CorruptFile(f"{where} is damaged: {how}.", action="It was not used.")


def write_envelope(path: Path, envelope: StoredEnvelope) -> None:
    """Write an envelope file; it is complete on disk when this returns.

    Raises:
        DiskFull, StorageError: no file was changed.
    """
    write_atomic(path, *envelope.pieces())


class EnvelopeFile:
    """An open envelope in a file; its body is read on demand and never held in memory completely.

    Opening it checks everything before the body, and the body's size; the bytes of the body are
    checked by `verify`, or by decryption. Close it, or use it in a ``with`` block.

    Args:
        place: a file of its own, or a part of one.

    Attributes:
        header, signature, wrap: as stored.

    Raises:
        CorruptFile: it was altered or truncated.
        StorageError: it cannot be read.
    """

    def __init__(self, place: Path | FilePart) -> None:
        path, offset = (place, 0) if isinstance(place, Path) else (place.path, place.offset)
        self._path, where = path, str(path)
        with storage_errors("read", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with storage_errors("read", path):
                total = os.fstat(self._fd).st_size if isinstance(place, Path) else place.size
                preamble = read_at(self._fd, offset, min(_PREAMBLE_BYTES, total))
                lengths = _lengths(preamble, total, where)
                head_bytes = _PREAMBLE_BYTES + sum(lengths[:3])
                small = read_at(self._fd, offset, head_bytes)
            self._start = offset + head_bytes
            self.header, self.signature, self.wrap = _pieces(small, lengths, where)
            self.parsed = parse_header(self.header, max_plain_bytes=_ANY_SIZE)
            if lengths[3] != self.parsed.sealed_bytes:
                raise _damaged(where, f"expected {self.parsed.sealed_bytes} sealed bytes")
        except BaseException:
            self.close()
            raise

    def read(self, chunks: range) -> bytes:
        """Return consecutive chunks of the body.

        Raises:
            CorruptFile: another process cut the file meanwhile.
            StorageError: it cannot be read now.
        """
        extent = self.parsed.extent(chunks)
        size = min(extent.stop, self.parsed.sealed_bytes) - extent.start
        with storage_errors("read", self._path):
            data = read_at(self._fd, self._start + extent.start, size)
        if len(data) != size:
            raise _damaged(str(self._path), "it has become shorter")
        return data

    def steps(self) -> Iterator[bytes]:
        """Yield the body in order, a few chunks at a time."""
        count = len(self.parsed.hashes)
        step = max(1, _STEP_BYTES // self.parsed.chunk_bytes)
        for first in range(0, count, step):
            yield self.read(range(first, min(first + step, count)))

    def verify(self) -> None:
        """Check every byte of the body.

        Raises:
            CorruptFile: the body was altered.
        """
        count = len(self.parsed.hashes)
        for index in range(count):
            if not self.parsed.fits(index, self.read(range(index, index + 1))):
                raise _damaged(str(self._path), f"chunk {index} of {count} was altered")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_envelope(path: Path) -> StoredEnvelope:
    """Read an envelope file and check every byte.

    Raises:
        CorruptFile: it was altered or truncated.
        StorageError: it cannot be read.
    """
    with EnvelopeFile(path) as file:
        file.verify()
        body = b"".join(file.steps())
        return StoredEnvelope(file.header, file.signature, file.wrap, body)
