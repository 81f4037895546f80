"""Counted updates that a run keeps, for exact forgetting of a client.

One file for each, as opened: unencrypted, like states. Its name is the update's, its content begins
with a SHA-256 over name and content. It is on disk before the state that counts it is committed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from fcil_protocol.errors import CorruptFile
from fcil_protocol.ids import RunId, is_digest, sha256_of
from fcil_protocol.storage.atomic_files import storage_errors, sync_directory, write_atomic

SUFFIX = ".update"
_HASH_BYTES = 32


def kept_folder(directory: Path, run: RunId) -> Path:
    """Return the folder of a run's kept updates in a federation's directory."""
    return directory / "runs" / run / "kept"


class KeptUpdates:
    """The kept updates of one run, by update id.

    Args:
        directory: created with the first update.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, update: str) -> Path:
        """Return the path of an update."""
        assert is_digest(update), "an update's id is a digest"
        return self.directory / f"{update}{SUFFIX}"

    def put(self, updates: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Keep opened updates; they are on disk when this returns.

        Raises:
            DiskFull, StorageError: perhaps some of them are kept.
        """
        with storage_errors("create", self.directory):
            self.directory.mkdir(mode=0o700, exist_ok=True)
        for update, data in updates:
            if update not in self:
                write_atomic(self.path(update), _hash(update, data), data, sync_name=False)
        with storage_errors("sync", self.directory):
            sync_directory(self.directory)

    def get(self, update: str) -> bytes:
        """Return an update as it was opened."""
        path = self.path(update)
        if not path.exists():
            raise CorruptFile(f"the kept update {path} is missing.", action=_RESTORE)
        with storage_errors("read", path):
            stored = path.read_bytes()
        data = stored[_HASH_BYTES:]
        if stored[:_HASH_BYTES] != _hash(update, data):
            raise CorruptFile(
                f"the kept update {path} is damaged: its content does not match its checksum.",
                action=_RESTORE,
            )
        return data

    def __contains__(self, update: str) -> bool:
        return self.path(update).exists()

    def names(self) -> list[str]:
        """Return the ids of all kept updates, sorted."""
        if not self.directory.is_dir():
            return []
        with storage_errors("list", self.directory):
            found = [p.stem for p in self.directory.glob(f"*{SUFFIX}")]
        return sorted(name for name in found if is_digest(name))

    def size_bytes(self) -> int:
        """Return their size on disk, bytes."""
        return sum(self.path(name).stat().st_size for name in self.names())

    def remove(self, updates: Iterable[str]) -> int:
        """Remove updates; return their number.

        Raises:
            StorageError: one cannot be removed.
        """
        gone = [update for update in updates if update in self]
        for update in gone:
            with storage_errors("remove", self.path(update)):
                self.path(update).unlink(missing_ok=True)
        return len(gone)

    def share(self, other: KeptUpdates, updates: Iterable[str]) -> None:
        """Let another run keep these too: the same files, or copies where links are impossible.

        Updates that are not kept here are skipped.

        Raises:
            DiskFull, StorageError.
        """
        held = [update for update in updates if update in self]
        if not held:
            return
        with storage_errors("create", other.directory):
            other.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for update in held:
            with contextlib.suppress(OSError):  # a file system without links gets a copy
                os.link(self.path(update), other.path(update))
        other.put((update, self.get(update)) for update in held if update not in other)


_RESTORE = "Restore a backup that was written after it came: fcil-server restore FILE --dir NEW"


def _hash(update: str, data: bytes | memoryview) -> bytes:
    return bytes.fromhex(sha256_of(update.encode("ascii"), data))
