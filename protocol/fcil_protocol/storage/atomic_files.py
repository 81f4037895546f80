"""Files, written so that a crash or a full disk never leaves an incomplete one.

The only place for this technique: temporary file in the same directory, sync, rename, sync of the
directory; locks that end with their process; errors of the operating system as one sentence that
names the path, the disk and a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fcil_protocol.errors import CorruptFile, DiskFull, KeyFileError, StorageError
from fcil_protocol.storage.lock_holder import LOCK_NAME, take_lock

MAX_PRIVATE_BYTES = 64 * 1024  # a key file has less than 1 kB
_STEP_BYTES = 1 << 20  # memory for copying, independent of a file's size

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.tmp")

# errno -> (reason, remedy); other numbers get the system's own text.
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
        path: the file or directory that the sentence names.

    Raises:
        DiskFull: no space or quota is left; the message names the disk and its free space.
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
        if error.errno == errno.ENOENT and not path.parent.exists():
            reason, action = f"there is no folder {path.parent}", "Create it, or check the path."
        raise StorageError(f"cannot {what} {path}: {reason}.", action=action) from error


def _space(path: Path, number: int | None) -> str:
    """Return a phrase with the disk (by its mount point) and its free space."""
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


@dataclass(frozen=True)
class FilePart:
    """Consecutive bytes of a file that is on disk already, read step by step.

    Attributes:
        offset, size: in bytes.
        if_shorter: the remedy that the error names if the file has become shorter.
    """

    path: Path
    offset: int
    size: int
    if_shorter: str = "Check its disk."

    def __len__(self) -> int:
        return self.size

    def steps(self) -> Iterator[bytes]:
        """Yield the bytes in order, at most 1 MiB at a time.

        Raises:
            CorruptFile: the file has become shorter.
            StorageError: it cannot be read.
        """
        with storage_errors("read", self.path):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in range(0, self.size, _STEP_BYTES):
                wanted = min(_STEP_BYTES, self.size - start)
                with storage_errors("read", self.path):
                    data = read_at(fd, self.offset + start, wanted)
                if len(data) != wanted:
                    raise CorruptFile(
                        f"{self.path} is shorter than it was.", action=self.if_shorter
                    )
                yield data
        finally:
            os.close(fd)


Piece = bytes | bytearray | memoryview | FilePart  # of what is written to a file


def steps_of(pieces: Iterable[Piece]) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the pieces in order: as they are in memory, and step by step from a file."""
    for piece in pieces:
        if isinstance(piece, FilePart):
            yield from piece.steps()
        else:
            yield piece


def write_atomic(
    path: Path,
    *data: Piece,
    mode: int = 0o600,
    sync: bool = True,
    sync_name: bool = True,
) -> None:
    """Write a file so that at any moment the old or the new content is there, complete.

    By default it is on disk when this returns.

    Args:
        path: in an existing directory.
        data: the complete content, in pieces.
        mode: permissions from the first moment on (less the umask).
        sync: False for a file that is checked when read and can be made again: it outlives this
            process, but perhaps not a power cut, which may even leave the name without content.
        sync_name: False if the caller writes another file into the directory after this one: the
            content is on disk, but the name only with the next sync of the directory.

    Raises:
        DiskFull, StorageError: no file was changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    with storage_errors("write", path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, mode)
            try:
                for step in steps_of(data):
                    write_all(fd, step)
                if sync:
                    sync_data(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if sync and sync_name:
            sync_directory(path.parent)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes at the descriptor's position; continue after a short write."""
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
    """Return when the file's content is on disk, not only in the kernel."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(directory: Path) -> None:
    """Create a directory, and every missing one above it, for this user alone.

    ``Path.mkdir`` gives its mode to the last one only.
    """
    for place in (*reversed(directory.parents), directory):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


def read_private(path: Path) -> bytes:
    """Read a file that only its owner may read, such as a key file.

    Raises:
        KeyFileError: it is missing, no regular file, too large, or readable by others.
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
            raise KeyFileError(f"{path} is not a key file.", action="Check the path.")
        if status.st_mode & 0o077:
            raise KeyFileError(
                f"{path} has permissions {stat.S_IMODE(status.st_mode):04o}, so others can use "
                "the keys in it; expected 0600.",
                action=f"If no one else did, run: chmod 600 {path}",
            )
        return file.read()


def place_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name, unless another process has taken it meanwhile.

    Raises:
        FileExistsError: the name is taken; that file is untouched.
        OSError: no file was changed.
    """
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Sticks and some shares have none: the name is reserved first, then replaced.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            temporary.replace(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    else:
        temporary.unlink()
    sync_directory(path.parent)


@contextlib.contextmanager
def scratch(folder: Path, stem: str) -> Iterator[Callable[[str], Path]]:
    """Provide names for unfinished files or folders, and remove those of killed processes.

    A process that works in ``folder`` holds the kernel's lock on a file of its own, which ends with
    the process. So the names of a living one are spared in any container or, if the share passes
    locks on, on any host; a process id identifies no process there.

    Args:
        folder: an existing directory, possibly shared with other processes.
        stem: beginning of the names, after a dot; the same for all processes that may tidy up.

    Yields:
        A function from a word to a path; files under such a path are removed at the end.

    Raises:
        DiskFull, StorageError: the lock file cannot be made.
    """
    mark = f"{os.getpid()}-{os.urandom(4).hex()}"

    def name(what: str) -> Path:
        return folder / f".{stem}.{mark}.{what}.tmp"

    lock = name("lock")
    with storage_errors("create", lock):
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # without locks, no process tidies up either
            fcntl.flock(fd, fcntl.LOCK_EX)
        _tidy(folder, stem, lock)
        yield name
    finally:
        _discard(folder, f".{stem}.{mark}")
        os.close(fd)


def _tidy(folder: Path, stem: str, own: Path) -> None:
    """Remove the files of locks that no process holds any more."""
    for lock in folder.glob(f".{glob.escape(stem)}.*.lock.tmp"):
        if lock == own:
            continue
        with contextlib.suppress(OSError):  # held, of another user, or gone: leave it
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A process that was just starting has no other files yet: no data is lost.
                _discard(folder, lock.name.removesuffix(".lock.tmp"))
            finally:
                os.close(fd)


def _discard(folder: Path, beginning: str) -> None:
    """Remove a process's unfinished files and folders, its lock last."""
    left = sorted(folder.glob(f"{glob.escape(beginning)}.*.tmp"), key=_is_lock)
    for path in left:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_lock(path: Path) -> bool:
    return path.name.endswith(".lock.tmp")


class DirectoryLock:
    """The exclusive right of one process to work in a directory.

    The lock is the kernel's (flock on ``<directory>/lock``), so it ends with the process,
    even after kill -9; the file stays. Use `acquire`, then `release` or a ``with`` block.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path, what: str) -> Self:
        """Take the lock, and remove temporary files that killed processes left behind.

        Args:
            directory: an existing directory.
            what: kind of directory, for the message: ``"federation"``, ``"client"``.

        Raises:
            Locked: another process has it; the message names its process id.
            StorageError: the lock file cannot be created.
        """
        path = directory / LOCK_NAME
        with storage_errors("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage_errors("lock", path):
                take_lock(fd, directory, what)
            # The number only serves the message above: a full disk must not stop a start.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            _sweep(directory)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _sweep(directory: Path) -> None:
    """Remove incomplete files of others; this process has none before it has the lock."""
    for path in directory.rglob(".*.tmp"):
        if is_temporary_name(path.name) and not is_written(path.name, but_by=os.getpid()):
            with contextlib.suppress(OSError):
                path.unlink()


def is_temporary_name(name: str) -> bool:
    """Return True for the name of a temporary file of `write_atomic`."""
    return _TEMPORARY.fullmatch(name) is not None


def is_written(name: str, *, but_by: int = 0) -> bool:
    """Return True if the process named in a temporary file's name is alive, and not ``but_by``.

    Only for a directory whose lock shows that its other users are on this machine.
    """
    match = _TEMPORARY.fullmatch(name)
    if match is None or int(match[1]) == but_by:
        return False
    pid = int(match[1])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
