"""The receiving side of one envelope: chunks in any order, each verified before it is kept.

The same on server and client. A large envelope is assembled in a file and continues there after a
crash: chunks in the file count only if the header's hashes confirm them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from fcil_protocol.envelopes.header import Header
from fcil_protocol.errors import WireError
from fcil_protocol.storage.atomic_files import (
    FilePart,
    Piece,
    steps_of,
    storage_errors,
    write_all,
    write_atomic,
)


class Assembly:
    """The chunks of one envelope.

    Args:
        header: a header whose signature was verified.
        path: file for the chunks, in an existing directory; None keeps them in memory.
        head: bytes before the chunks in the file, so that the complete file is the final one.

    Raises:
        DiskFull, StorageError: the disk has no room for the file.
    """

    def __init__(self, header: Header, *, path: Path | None, head: bytes = b"") -> None:
        self.header = header
        self.received_bytes = 0
        self._path = path
        self._head = head
        self._memory: dict[int, bytes] = {}
        self._have = bytearray(len(header.hashes))  # 1 where the chunk is stored
        if path is not None and not self._resume(path):
            self._create(path)

    @classmethod
    def of_verified(cls, header: Header, chunks: Iterable[bytes]) -> Self:
        """Return a complete one in memory, of chunks that another process has verified."""
        made = cls(header, path=None)
        for index, chunk in enumerate(chunks):
            made._memory[index] = chunk
            made._count(index)
        return made

    # --- the file ---------------------------------------------------------------------------

    def _resume(self, path: Path) -> bool:
        """Count the chunks left by an earlier process; return False if there is no such file."""
        with storage_errors("read", path):
            if not path.exists() or path.stat().st_size != self._file_bytes:
                return False
            with path.open("r+b") as file:
                file.write(self._head)  # each session wraps the key afresh
                for index in range(len(self._have)):
                    chunk = file.read(self.header.chunk_size(index))
                    if self.header.fits(index, chunk):
                        self._count(index)
        return True

    @property
    def _file_bytes(self) -> int:
        return len(self._head) + self.header.sealed_bytes

    def _create(self, path: Path) -> None:
        """Reserve the space now, so that a full disk is reported before the first chunk."""
        with storage_errors("reserve space for", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, self._file_bytes)
                else:
                    os.ftruncate(fd, self._file_bytes)
                write_all(fd, self._head)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    def _write(self, path: Path, index: int, data: bytes | memoryview) -> None:
        # No sync: after a power cut a lost chunk does not match its hash and is fetched again.
        with storage_errors("write", path):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                offset, rest = self._offset(index), memoryview(data)
                while rest:
                    written = os.pwrite(fd, rest, offset)
                    offset, rest = offset + written, rest[written:]
            finally:
                os.close(fd)

    def _offset(self, index: int) -> int:
        return len(self._head) + index * self.header.chunk_bytes

    # --- chunks -----------------------------------------------------------------------------

    def put(self, index: int, data: bytes | memoryview) -> bool:
        """Store the chunks of a message: one, or several consecutive ones.

        Args:
            index: number of the first.
            data: all of them, concatenated.

        Returns:
            True if one of them is new, False if all were stored already.

        Raises:
            WireError: no such chunk exists, or its size or hash do not fit. Those before it are
                stored.
            DiskFull, StorageError: they could not be written; none was stored.
        """
        view, offset, end = memoryview(data), 0, index
        fault: WireError | None = None
        while fault is None and (offset < len(view) or end == index):
            fault = self._fault(end, view[offset:])
            if fault is None:
                offset += self.header.chunk_size(end)
                end += 1
        new = self._keep(range(index, end), view)
        if fault is not None:
            raise fault
        return new

    def _fault(self, index: int, rest: memoryview) -> WireError | None:
        """Return the error of bytes that do not begin with this chunk; None if they do."""
        count = len(self._have)
        if not 0 <= index < count:
            return WireError(f"expected a chunk of 0 to {count - 1}, got {index}.")
        expected = self.header.chunk_size(index)
        if len(rest) < expected:
            return WireError(f"chunk {index}: expected {expected} bytes, got {len(rest)}.")
        if not self.header.fits(index, rest[:expected]):
            return WireError(
                f"chunk {index} of envelope {self.header.update_id[:16]} does not match its hash.",
                action="It was altered on the way, or belongs to another envelope.",
            )
        return None

    def _keep(self, chunks: range, view: memoryview) -> bool:
        """Store verified chunks; ``view`` begins with the first."""
        if all(self._have[index] for index in chunks):
            return False
        if self._path is None:
            for index in chunks:
                start = (index - chunks.start) * self.header.chunk_bytes
                size = self.header.chunk_size(index)
                self._memory.setdefault(index, bytes(view[start : start + size]))
        else:
            size = sum(map(self.header.chunk_size, chunks))
            self._write(self._path, chunks.start, view[:size])
        for index in chunks:
            if not self._have[index]:
                self._count(index)
        return True

    def _count(self, index: int) -> None:
        self._have[index] = 1
        self.received_bytes += self.header.chunk_size(index)

    def has(self, index: int) -> bool:
        """Return True if the chunk is stored."""
        return bool(self._have[index])

    def missing(self, limit: int) -> list[int]:
        """Return the first missing chunks, at most ``limit``, ascending."""
        found: list[int] = []
        index = self._have.find(0)
        while index >= 0 and len(found) < limit:
            found.append(index)
            index = self._have.find(0, index + 1)
        return found

    @property
    def complete(self) -> bool:
        """True if every chunk is stored."""
        return self.received_bytes == self.header.sealed_bytes

    def in_memory(self) -> dict[int, bytes]:
        """Return the stored chunks by index; none of an envelope in a file."""
        return dict(self._memory)

    def body(self) -> list[Piece]:
        """Return the whole body in pieces: the chunks, or their place in the file."""
        assert self.complete, "a body is there when all chunks are"
        if self._path is None:
            return [self._memory[index] for index in range(len(self._have))]
        place = (self._path, self._offset(0), self.header.sealed_bytes)
        return [FilePart(*place, if_shorter="It is fetched again.")]

    def steps(self) -> Iterator[bytes | bytearray | memoryview]:
        """Yield the whole body in order, a file's at most 1 MiB at a time.

        Raises:
            CorruptFile: another process cut the file meanwhile.
        """
        return steps_of(self.body())

    def finish(self, path: Path) -> None:
        """Give the complete file, with its head, its final name; only once.

        It is not synced: bytes lost in a power cut do not match their hashes.

        Raises:
            DiskFull, StorageError: it still has its old name.
        """
        assert self.complete, "a file is finished when all chunks are there"
        if self._path is None:
            write_atomic(path, self._head, *self.body(), sync=False)
        else:
            with storage_errors("write", path):
                self._path.replace(path)

    def discard(self) -> None:
        """Discard all chunks, and remove the file."""
        self._memory.clear()
        self._have = bytearray(len(self.header.hashes))
        self.received_bytes = 0
        if self._path is not None:
            with storage_errors("remove", self._path):
                self._path.unlink(missing_ok=True)
