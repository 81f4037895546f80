"""One file of the spool: consecutive records, each with its own checksums.

    record: magic 4, version 1, kind 1, size of key 2, size of body 8,
            SHA-256(salt, the above, key, body) 32, CRC-32(salt, all the above) 4,
            key, body

The CRC tells a damaged head (sizes unknown) from a damaged body and from an incomplete record. The
salt is random for each file and is in its name: bodies come from outside, and without it one could
contain bytes that look like another sender's record.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Self

from fcil_protocol.errors import CorruptFile, StorageError
from fcil_protocol.storage.atomic_files import (
    FilePart,
    Piece,
    read_at,
    steps_of,
    storage_errors,
    sync_directory,
    write_all,
    write_atomic,
)

MAX_KEY_BYTES = 200
_MAGIC = b"fspl"
_VERSION = 1
_FIELDS = struct.Struct("<4sBBHQ")
_DIGEST_BYTES = 32
_CRC = struct.Struct("<I")
HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES + _CRC.size
_STEP_BYTES = 1 << 20  # memory for scanning, independent of a record's size
_SALT_BYTES = 16
_NAME = re.compile(r"(\d{8})-([0-9a-f]{32})\.seg")


class RecordKind(IntEnum):
    """Type of a record; the spool writes only data."""

    DATA = 1
    REMOVED = 2  # the key's earlier record no longer counts; no body
    HOLE = 3  # damaged bytes that were moved aside; no key


@dataclass(frozen=True)
class RecordSpan:
    """Position of a valid record."""

    kind: RecordKind
    key: str
    offset: int
    key_bytes: int
    body_bytes: int

    @property
    def size(self) -> int:
        """Bytes of head, key and body."""
        return HEAD_BYTES + self.key_bytes + self.body_bytes


@dataclass(frozen=True)
class Damage:
    """A stretch without a valid record.

    Attributes:
        torn: the start of a record that was being written, at the end; it was never durable.
    """

    offset: int
    size: int
    torn: bool


@dataclass(eq=False)
class Segment:
    """One segment file.

    Attributes:
        end: offset of the next record.
        synced: all bytes before this offset are on disk.
        records: the data records by key, also those that no longer count.
        open_end: records may be appended.
    """

    path: Path
    number: int
    salt: bytes = field(repr=False)
    end: int = 0
    synced: int = 0
    records: dict[str, RecordSpan] = field(default_factory=dict)
    open_end: bool = True
    _fd: int = -1

    @classmethod
    def create(cls, directory: Path, number: int) -> Self:
        """Create a new, empty segment file.

        Raises:
            DiskFull, StorageError: it cannot be created.
        """
        salt = os.urandom(_SALT_BYTES)
        segment = cls(directory / f"{number:08d}-{salt.hex()}.seg", number, salt)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        with storage_errors("create", segment.path):
            segment._fd = os.open(segment.path, flags, 0o600)
        return segment

    @classmethod
    def all_in(cls, directory: Path) -> list[Self]:
        """Return the existing segments of a directory, oldest first."""
        with storage_errors("list", directory):
            names = sorted(path.name for path in directory.iterdir())
        matches = (_NAME.fullmatch(name) for name in names)
        return [cls(directory / m[0], int(m[1]), bytes.fromhex(m[2])) for m in matches if m]

    @property
    def descriptor(self) -> int:
        """The open file, for appending and syncing."""
        if self._fd < 0:
            with storage_errors("open", self.path):
                self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        return self._fd

    def close(self) -> None:
        """Close the file; reading and appending reopen it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- one record -------------------------------------------------------------------------

    def append(self, kind: RecordKind, key: str, *body: Piece) -> None:
        """Append a record; not durable before the file is synced.

        Args:
            kind: type of the record.
            key: its name.
            body: its body, in pieces. One in a file is read twice: the head has its SHA-256.

        Raises:
            DiskFull, StorageError: the file is unchanged, or accepts no more records.
        """
        name = key.encode()
        size = sum(len(piece) for piece in body)
        record = RecordSpan(kind, key, self.end, len(name), size)
        fields = _FIELDS.pack(_MAGIC, _VERSION, kind, len(name), size)
        digest = hashlib.sha256(self.salt + fields + name)
        for step in steps_of(body):
            digest.update(step)
        fd = self.descriptor
        with storage_errors("append to", self.path):
            try:
                write_all(fd, self._head(fields, digest.digest()) + name)
                for step in steps_of(body):
                    write_all(fd, step)
            except BaseException:  # also one of reading the body, or of memory for a step
                try:
                    self.cut(self.end)
                except StorageError:  # what is left is recognised as torn at the next opening
                    self.open_end = False
                raise
        self.end += record.size
        if kind is RecordKind.DATA:
            self.records[key] = record

    def cut(self, end: int) -> None:
        """Drop all bytes from an offset on.

        Raises:
            StorageError: they are still there.
        """
        with storage_errors("cut", self.path):
            os.ftruncate(self.descriptor, end)
        self.end = end
        self.records = {key: r for key, r in self.records.items() if r.offset < end}

    def body(self, record: RecordSpan) -> FilePart:
        """Return the place of a record's body, for a reader that authenticates it."""
        return FilePart(
            self.path, record.offset + record.size - record.body_bytes, record.body_bytes
        )

    def read(self, record: RecordSpan) -> bytes:
        """Return the body of a record.

        Args:
            record: its position, for instance from ``records``.

        Raises:
            CorruptFile: it has changed since it was written.
            StorageError: it cannot be read.
        """
        with storage_errors("read", self.path):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                head = read_at(fd, record.offset, HEAD_BYTES + record.key_bytes)
                body = read_at(fd, record.offset + len(head), record.body_bytes)
            finally:
                os.close(fd)
        digest = hashlib.sha256(self.salt + head[: _FIELDS.size] + head[HEAD_BYTES:])
        digest.update(body)
        if digest.digest() != head[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES]:
            raise CorruptFile(
                f"the record {record.key!r} in {self.path} is damaged.",
                action="Its sender must send it again; the others are not affected.",
            )
        return body

    def _head(self, fields: bytes, digest: bytes) -> bytes:
        return fields + digest + _CRC.pack(zlib.crc32(self.salt + fields + digest))

    # --- scan -------------------------------------------------------------------------------

    def scan(self) -> Iterator[RecordSpan | Damage]:
        """Yield the records and damages of the file, in order; every byte is checked."""
        with storage_errors("read", self.path):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.end = size = os.fstat(fd).st_size
                offset = 0
                while offset < size:
                    found = self._examine(fd, offset, size)
                    yield found
                    offset += found.size
            finally:
                os.close(fd)

    def _examine(self, fd: int, offset: int, size: int) -> RecordSpan | Damage:
        record = self._parse_head(read_at(fd, offset, HEAD_BYTES), offset)
        rest = size - offset
        if record is None:
            start = read_at(fd, offset, len(_MAGIC))
            torn = rest < HEAD_BYTES and _MAGIC.startswith(start)
            after = size if torn else self._next_record(fd, offset + 1, size)
            return Damage(offset, after - offset, torn)
        if record.size > rest:
            return Damage(offset, rest, torn=True)
        return self._check(fd, record) or Damage(offset, record.size, torn=False)

    def _parse_head(self, head: bytes, offset: int) -> RecordSpan | None:
        """Return the record described by its head, if the head is intact."""
        if len(head) < HEAD_BYTES:
            return None
        covered, (crc,) = head[: -_CRC.size], _CRC.unpack(head[-_CRC.size :])
        magic, version, kind, key_bytes, body_bytes = _FIELDS.unpack_from(head)
        if magic != _MAGIC or crc != zlib.crc32(self.salt + covered):
            return None
        if version != _VERSION or kind not in set(RecordKind):
            raise StorageError(
                f"{self.path} holds records of format {version}.{kind}, which this fcil does not "
                f"know (expected {_VERSION}.1 to {_VERSION}.{max(RecordKind)}).",
                action="Use the fcil version that wrote it.",
            )
        return RecordSpan(RecordKind(kind), "", offset, key_bytes, body_bytes)

    def _check(self, fd: int, record: RecordSpan) -> RecordSpan | None:
        """Return the record with its key if its SHA-256 matches."""
        head = read_at(fd, record.offset, HEAD_BYTES + record.key_bytes)
        name = head[HEAD_BYTES:]
        digest = hashlib.sha256(self.salt + head[: _FIELDS.size] + name)
        position, end = record.offset + len(head), record.offset + record.size
        while position < end:
            piece = read_at(fd, position, min(_STEP_BYTES, end - position))
            digest.update(piece)
            position += len(piece)
        if digest.digest() != head[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES]:
            return None
        try:
            key = name.decode()
        except UnicodeDecodeError:  # only a sender that can compute checksums wrote it
            return None
        return RecordSpan(record.kind, key, record.offset, len(name), record.body_bytes)

    def _next_record(self, fd: int, start: int, size: int) -> int:
        """Return the offset of the next valid record; the end of the file if there is none."""
        overlap = len(_MAGIC) - 1
        position = start
        while position < size:
            block = read_at(fd, position, _STEP_BYTES)
            found = block.find(_MAGIC)
            while found >= 0:
                offset = position + found
                record = self._parse_head(read_at(fd, offset, HEAD_BYTES), offset)
                if record and record.size <= size - offset and self._check(fd, record):
                    return offset
                found = block.find(_MAGIC, found + 1)
            position += max(len(block) - overlap, 1)
        return size

    # --- repair -----------------------------------------------------------------------------

    def _mapped(self) -> memoryview:
        with storage_errors("read", self.path), self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def set_aside(self, damage: Damage, aside: Path) -> None:
        """Copy damaged bytes to a file of their own; raises DiskFull, StorageError."""
        with storage_errors("create", aside.parent):
            aside.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(aside, self._mapped()[damage.offset : damage.offset + damage.size])

    def rewrite(self, keys: Iterable[str]) -> None:
        """Keep the records of these keys, one at least, and nothing else of the file.

        A kill or a power cut leaves the whole old file or the whole new one under the name.

        Raises:
            DiskFull, StorageError: the file is the old one, or the new one may not be durable.
        """
        kept, old = [self.records[key] for key in keys], self._mapped()
        pieces = (old[record.offset : record.offset + record.size] for record in kept)
        write_atomic(self.path, *pieces, sync_name=False)
        self.close()  # its descriptor is that of the old file
        self.records, self.end = {}, 0
        for record in kept:
            self.records[record.key] = replace(record, offset=self.end)
            self.end += record.size
        self.synced = self.end
        with storage_errors("sync", self.path):
            sync_directory(self.path.parent)
