"""The lock of a directory: its holder, and waiting for that process to end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.errors import Locked, Timeout

LOCK_NAME = "lock"
LOOK_S = 0.1  # between two checks of a lock; the kernel reports no change
TELL_S = 5.0  # between two messages about a process that has not ended


# Remedy for a directory of this kind in use.
_ACTIONS = {
    "federation": "See what it is doing: fcil-server status. Stop it: fcil-server stop. Or name "
    "another directory: --dir",
    "client": "A client is already running for these images: fcil-client status shows it. To "
    "restart it, stop that process first.",
}


def take_lock(fd: int, directory: Path, what: str) -> None:
    """Take the lock of a directory, for `atomic_files.DirectoryLock`.

    Raises:
        Locked: another process has it; the message names its process id.
    """
    try:
        _lock_soon(fd)
    except BlockingIOError as error:
        raise Locked(
            f"the {what} directory {directory} is in use by {_named(_pid_in(fd))}.",
            action=_ACTIONS.get(what, "Stop that process, or use another directory."),
        ) from error


def _lock_soon(fd: int) -> None:
    for _ in range(4):  # a command may be checking the holder
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() else 0


def _named(pid: int) -> str:
    return f"process {pid}" if pid else "another process"


def holder_of(directory: Path) -> str | None:
    """Return ``process N`` if a process works in a directory; None if none does.

    That process loses nothing, nor does one that begins at this moment: `take_lock` tries for
    longer than a check of the lock lasts.
    """
    pid = holding_pid(directory)
    return None if pid is None else _named(pid)


def holding_pid(directory: Path) -> int | None:
    """Return the id of the process that works in a directory; 0 if unknown, None if none does."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd)
    finally:
        os.close(fd)
    return None


def wait_until_over(
    directory: Path, pid: int | None, timeout_s: float, notify: Callable[[str], None]
) -> None:
    """Wait until a process has ended and the lock of its directory is free.

    Args:
        directory: the directory that it holds.
        pid: its id, from an earlier `holding_pid`; None or 0: wait for the lock alone.
        timeout_s: longest wait.
        notify: receives a message every few seconds while the process still writes.

    Raises:
        Timeout: the process has not ended.
    """
    began = told = time.monotonic()
    process = _open(pid)
    try:
        while holder_of(directory) is not None or not _has_ended(process):
            now = time.monotonic()
            if now - began > timeout_s:
                raise Timeout(
                    f"{holder_of(directory) or f'process {pid}'} was asked to stop "
                    f"{now - began:.0f} s ago, but still uses {directory}.",
                    action="It may be waiting for a disk; see its log. A second signal stops it "
                    "immediately.",
                )
            if now - told >= TELL_S:
                told = now
                notify(f"it is still writing ({now - began:.0f} s) ...")
            _wait(process, min(TELL_S, timeout_s - (now - began)))
    finally:
        if process is not None:
            os.close(process)


def _open(pid: int | None) -> int | None:
    """Return a descriptor that reports the end of a process; None if there is none."""
    if not pid or not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):  # it is over, or in another container
        return os.pidfd_open(pid)
    return None


def _wait(process: int | None, most_s: float) -> None:
    """Wait for the end of a process; if that is not reported, or over, until the next look."""
    if _has_ended(process):
        time.sleep(LOOK_S)
    else:
        _has_ended(process, most_s)


def _has_ended(process: int | None, wait_s: float = 0.0) -> bool:
    # Readable as soon as it has ended, even before its exit code is collected.
    return process is None or bool(select.select([process], [], [], wait_s)[0])
