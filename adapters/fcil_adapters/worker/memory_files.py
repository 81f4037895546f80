"""Payloads in anonymous memory, on their way between a daemon and its worker.

The payloads of a message follow each other in one sealed file without a name. Large ones begin at a
page of their own, so that the receiver maps them instead of copying them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from fcil_protocol.errors import DiskFull, StorageError, WireError

_STEP = 1 << 30  # Linux moves at most 2 GiB in one call
# Afterwards no process can change the file (Linux): F_SEAL_SEAL, _SHRINK, _GROW, _WRITE.
_SEALS = 0x1 | 0x2 | 0x4 | 0x8
# Smaller payloads are copied: each mapping costs a descriptor, of which a process has 1,024, and
# copying 1 MiB takes 0.2 ms.
MAPPED_BYTES = 1 << 20

Blob = bytes | memoryview  # a received payload; a view keeps its memory file
Pieces = Sequence[Blob]  # a payload to send; only the file joins the pieces


class MemoryFile:
    """A payload that is written piece by piece into the memory in which it travels.

    It may be sent once, as the only payload of a message.
    """

    def __init__(self) -> None:
        self.size = 0  # bytes
        self._fd = -1
        self._fd = _anonymous()

    def write(self, data: Blob) -> None:
        """Append some bytes.

        Raises:
            DiskFull: there is not enough memory.
        """
        _write(self._fd, data, self.size)
        self.size += len(data)

    def release(self) -> int:
        """Seal the file and hand over its descriptor."""
        fd, self._fd = self._fd, -1
        _seal(fd)
        return fd

    def close(self) -> None:
        """Free the memory, unless its descriptor was handed over."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # ends what a cancelled call's thread still writes


def size_of(payload: Pieces | MemoryFile) -> int:
    """Return a payload's size in bytes."""
    return payload.size if isinstance(payload, MemoryFile) else sum(map(len, payload))


def file_of(payloads: Sequence[Pieces | MemoryFile]) -> int:
    """Put payloads, each in pieces, into one sealed file, and return its descriptor."""
    if len(payloads) == 1 and isinstance(payloads[0], MemoryFile):
        return payloads[0].release()
    blobs = [p for p in payloads if not isinstance(p, MemoryFile)]
    assert len(blobs) == len(payloads), "a memory file travels alone"
    try:
        fd = _anonymous()
    except OSError as error:
        raise StorageError(
            f"a payload for the worker needs a file of its own: {error.strerror}.",
            action="Raise the limit of open files (ulimit -n), or free memory.",
        ) from error
    try:
        for start, pieces in zip(_layout(map(size_of, blobs)), blobs, strict=True):
            at = start
            for piece in pieces:
                _write(fd, piece, at)
                at += len(piece)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, blob: Blob, at: int) -> None:
    view = memoryview(blob)
    try:
        while view:
            done = os.pwrite(fd, view[:_STEP], at)
            view, at = view[done:], at + done
    except OSError as error:
        raise DiskFull(
            f"{len(blob)} bytes for the worker do not fit: {error.strerror}.",
            action="Free memory on this machine.",
        ) from error


def _seal(fd: int) -> None:
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _is_sealed(fd: int) -> bool:
    """Return True if no process can change or shorten the file; files on disks cannot be sealed."""
    with contextlib.suppress(OSError, AttributeError):
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return False


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fcil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # macOS: a file of this user alone (0600), whose name goes before the first byte comes.
    fd, path = tempfile.mkstemp(prefix="fcil-")
    os.unlink(path)  # noqa: PTH108  mkstemp gives a string
    return fd


def _read_at(fd: int, offset: int, size: int) -> bytes:
    steps = []
    while size:
        data = os.pread(fd, min(size, _STEP), offset)
        if not data:
            raise WireError("a worker's payload file ended early.")
        steps.append(data)
        offset, size = offset + len(data), size - len(data)
    return steps[0] if len(steps) == 1 else b"".join(steps)


def read_file(fd: int, sizes: Sequence[int]) -> list[Blob]:
    """Return the payloads of a received file; mapped ones keep its memory.

    Raises:
        WireError: it does not have the announced size.
    """
    places = list(_layout(sizes))
    found, expected = os.fstat(fd).st_size, places[-1] + sizes[-1]
    if found != expected:
        raise WireError(f"payloads of {expected} bytes came in a file of {found} bytes.")
    return [_read(fd, at, size) for at, size in zip(places, sizes, strict=True)]


def _layout(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the offset of each payload of a message in its file."""
    at = 0
    for size in sizes:
        if size >= MAPPED_BYTES:
            at += -at % mmap.ALLOCATIONGRANULARITY
        yield at
        at += size


def _read(fd: int, at: int, size: int) -> Blob:
    """Map a large payload; copy a small one, and one that the sender could still change."""
    if size >= MAPPED_BYTES and _is_sealed(fd):
        with contextlib.suppress(OSError):  # no descriptor or address space is left
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ, offset=at))
    return _read_at(fd, at, size)
