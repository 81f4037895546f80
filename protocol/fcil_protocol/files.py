"""Files, written so that a crash or a full disk never leaves half of one.

The only place that knows how: temporary file in the same directory, sync, rename, sync of
the directory; locks that die with their process; errors of the operating system as one
sentence that names the path, the disk and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fcil_protocol.errors import DiskFull, KeyFileError, Locked, StorageError

MAX_PRIVATE_BYTES = 64 * 1024  # a key file has less than 1 kB
LOCK_NAME = "lock"

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.tmp")

# errno -> (reason, what to do); other numbers are told in the system's own words.
_REASONS: dict[int, tuple[str, str]] = {
    errno.EACCES: ("permission denied", "Let this user read and write it."),
    errno.EPERM: ("permission denied", "Let this user read and write it."),
    errno.EROFS: ("its disk is mounted read-only", "Mount the disk writable."),
    errno.ENOENT: ("it does not exist", "Check the path."),
    errno.ENOTDIR: ("a part of its path is not a directory", "Check the path."),
    errno.EISDIR: ("it is a directory", "Check the path."),
    errno.EFBIG: ("it would exceed the file size limit", "Raise the limit (ulimit -f)."),
    errno.EMFILE: ("too many files are open", "Raise the limit of open files (ulimit -n)."),
    errno.EIO: ("the disk reported a fault", "Check the disk before anything else."),
}


@contextlib.contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a sentence.

    Args:
        what: completes "cannot ...", for instance ``"write"`` or ``"list the parts of"``.
        path: the file or directory that is named.

    Raises:
        DiskFull: no space or quota is left; the message names the disk and what is free.
        StorageError: every other OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _OUT_OF_SPACE:
            raise DiskFull(
                f"cannot {what} {path}: {_space(path, error.errno)}.",
                action="Free space there; nothing that was acknowledged is lost.",
            ) from error
        reason, action = _REASONS.get(error.errno or 0, (str(error.strerror or error).lower(), ""))
        raise StorageError(f"cannot {what} {path}: {reason}.", action=action) from error


def _space(path: Path, number: int | None) -> str:
    """Say how much is free, on which disk (by its mount point)."""
    place = path.absolute()
    try:
        while not place.exists():
            place = place.parent
        free_mb = shutil.disk_usage(place).free / 1e6
        while not place.is_mount():
            place = place.parent
    except OSError:
        return "its disk is full"
    if number == errno.EDQUOT:
        return f"this user's quota on the disk at {place} is used up ({free_mb:.1f} MB free there)"
    return f"the disk at {place} is full ({free_mb:.1f} MB free)"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file so that at any moment the old or the new content is there, whole.

    It is on disk when this returns.

    Args:
        path: in an existing directory.
        data: the whole content.
        mode: permissions from the first moment on (less what the umask takes away).

    Raises:
        DiskFull, StorageError: nothing was changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    with storage_errors("write", path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, mode)
            try:
                write_all(fd, data)
                sync_data(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes at the descriptor's position; a short write is continued."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read ``size`` bytes from ``offset``; fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    pieces = [data]
    got = len(data)
    while got < size and (piece := os.pread(fd, size - got, offset + got)):
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


def sync_data(fd: int) -> None:
    """Return when the file's content is on the disk, not merely with the kernel."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(directory: Path) -> None:
    """Make a directory, and every one above it that is missing, for this user alone.

    ``Path.mkdir`` gives its mode to the last one only.
    """
    for place in (*reversed(directory.parents), directory):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


def read_private(path: Path) -> bytes:
    """Read a file that only its owner may read, such as a key file.

    Raises:
        KeyFileError: it is missing, no file, too large, or others may read it.
        StorageError: the system cannot read it.
    """
    with storage_errors("read", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise KeyFileError(
                f"the key file {path} does not exist.", action="Restore it from a backup."
            ) from error
    with storage_errors("read", path), open(fd, "rb") as file:  # noqa: PTH123
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PRIVATE_BYTES:
            raise KeyFileError(f"{path} is no key file.", action="Check the path.")
        if status.st_mode & 0o077:
            raise KeyFileError(
                f"{path} has permissions {stat.S_IMODE(status.st_mode):04o}, so others can use "
                "the keys in it; expected 0600.",
                action=f"If nobody did, run: chmod 600 {path}",
            )
        return file.read()


class DirectoryLock:
    """The right to be the one process that works in a directory.

    The lock is the kernel's (flock on ``<directory>/lock``), so it ends with the process,
    even after kill -9; the file stays. Use `acquire`, then `release` or a ``with`` block.
    """

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path, what: str) -> Self:
        """Take the lock, and remove temporary files that killed processes left behind.

        Args:
            directory: an existing directory.
            what: what it is, for the message: ``"federation"``, ``"client"``.

        Raises:
            Locked: another process has it; the message names its process id.
            StorageError: the lock file cannot be made.
        """
        path = directory / LOCK_NAME
        with storage_errors("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage_errors("lock", path):
                _flock(fd, directory, what)
            # The number only serves the message above: a full disk must not stop a start.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            _sweep(directory)
        except BaseException:
            os.close(fd)
            raise
        return cls(directory, fd)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _flock(fd: int, directory: Path, what: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        text = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        holder = f"process {text}" if text.isdigit() else "another process"
        raise Locked(
            f"the {what} directory {directory} is in use by {holder}.",
            action="Stop that process, or use another directory.",
        ) from error


def _sweep(directory: Path) -> None:
    """Remove temporary files whose writer is gone; only they carry its process id."""
    for path in directory.rglob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _writes(int(match[1])):
            with contextlib.suppress(OSError):
                path.unlink()


def _writes(pid: int) -> bool:
    """Say whether the process may still write; this one does not before it has the lock."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
