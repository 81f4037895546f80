"""A file of lines that only grows, and survives a kill, a power cut and a full disk.

Each of them can leave half a line at the end. A log of records that are valid only as a whole
removes it; a log that must keep every byte it once wrote leaves it, and begins a new line.
Readers decide what a damaged line means to them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.storage.atomic_files import storage_errors, sync_data, sync_directory, write_all


class AppendLog:
    """Appends lines to a file (0600); safe to use from several threads.

    Args:
        path: the file; the first line creates it.
        task: completes "cannot ..." in errors, for instance "write the journal in".
        keeps_half: leave half a last line in place, instead of removing it.
        full_at: a file of this size or more is renamed before the next line with a sync; 0: never.
        full_name: gives a full file its new name.
    """

    def __init__(
        self,
        path: Path,
        task: str,
        *,
        keeps_half: bool,
        full_at: int = 0,
        full_name: Callable[[], str] = str,
    ) -> None:
        self.path = path
        self._full_at, self._full_name = full_at, full_name
        self._task = task
        self._keeps_half = keeps_half
        self._lock = threading.Lock()
        self._named = False  # the file's name is on the disk

    def append(self, line: bytes, *, sync: bool = True) -> None:
        """Append one line.

        Args:
            line: without its newline.
            sync: the line and all before it are on the disk when this returns.

        Raises:
            DiskFull, StorageError: the line is not written, or not on the disk.
        """
        with self._lock, storage_errors(self._task, self.path):
            if sync and self._full_at:  # the sync puts a new file's name on the disk, too
                self._rename_if_full()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o600)
            try:
                write_all(fd, self._mend(fd) + line + b"\n")
                if sync:
                    sync_data(fd)
            finally:
                os.close(fd)
            if sync and not self._named:
                sync_directory(self.path.parent)
                self._named = True

    def _mend(self, fd: int) -> bytes:
        """Deal with half a last line; return the bytes to write before the next line."""
        size = os.fstat(fd).st_size
        if not size or os.pread(fd, 1, size - 1) == b"\n":
            return b""
        if self._keeps_half:
            return b"\n"
        os.ftruncate(fd, os.pread(fd, size, 0).rfind(b"\n") + 1)
        return b""

    def _rename_if_full(self) -> None:
        if self.path.exists() and self.path.stat().st_size >= self._full_at:
            with self.path.open("rb") as file:
                sync_data(file.fileno())  # lines that were appended without a sync
            self._named = False
            self.path.rename(self.path.with_name(self._full_name()))
