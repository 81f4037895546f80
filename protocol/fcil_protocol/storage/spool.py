"""The spool: acknowledged updates, one append-only file for each round, until they are removed.

Append records as they arrive, sync once for all of them, then acknowledge. Any thread may append,
read and remove; one at a time may sync, and waits for the disk without blocking the others. Bodies
are opaque here.

A file is deleted when none of its records counts any more. A removal leaves no mark on the disk:
until then an opening finds the record again, and its owner, who knows which ones are needed,
removes it again. Only `purge` takes the bytes of a record out of a file that stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from fcil_protocol.errors import AlreadyHave, CorruptFile, StorageError
from fcil_protocol.storage.atomic_files import (
    FilePart,
    Piece,
    storage_errors,
    sync_data,
    sync_directory,
)
from fcil_protocol.storage.segment import MAX_KEY_BYTES, Damage, RecordKind, Segment

QUARANTINE = "quarantine"

_T = TypeVar("_T")


class Spool:
    """Records by key, in a directory of segments.

    Opening checks every byte: the torn end of a killed process is cut off, damaged records are
    moved to ``quarantine/``, and the rest is made durable. The next record begins a segment.

    Args:
        directory: created if it does not exist; for one process at a time.

    Attributes:
        recovered: one sentence for each repair at opening.

    Raises:
        StorageError: the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.recovered: list[str] = []
        self._directory = directory
        self._guard = threading.Lock()
        self._segments: list[Segment] = []  # oldest first
        self._index: dict[str, Segment] = {}  # keys that count, oldest first
        self._unsynced: dict[str, None] = {}  # keys that a power cut could take
        self._name_unsynced = False  # a segment is new
        self._failed: StorageError | None = None  # error of a sync, for records appended during it
        with storage_errors("create", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._segments = Segment.all_in(directory)
        damages = [self._load(segment) for segment in self._segments]
        for segment, found in zip(self._segments, damages, strict=True):
            self._repair(segment, found)
            with storage_errors("sync", segment.path):
                # A killed process may have appended without a sync; what counts must be durable.
                sync_data(segment.descriptor)
            segment.synced = segment.end
            segment.close()
        with storage_errors("sync", directory):
            sync_directory(directory)
        self._collect()

    # --- opening ----------------------------------------------------------------------------

    def _load(self, segment: Segment) -> list[Damage]:
        segment.open_end = False
        damages = []
        for found in segment.scan():
            if isinstance(found, Damage):
                damages.append(found)
            elif found.kind is not RecordKind.HOLE:
                self._index.pop(found.key, None)  # a later record replaces an earlier one
                if found.kind is RecordKind.DATA:
                    self._index[found.key] = segment
                    segment.records[found.key] = found
        return damages

    def _repair(self, segment: Segment, damages: list[Damage]) -> None:
        """Cut off a torn end, and move other damage aside, so that it is found only once."""
        places = {d: f"{d.size} bytes at {d.offset} of {segment.path}" for d in damages}
        done = []
        try:
            for damage, place in places.items():
                if damage.torn:
                    done.append(f"{place}, half a record that was never durable, were cut off.")
                else:
                    name = f"{segment.path.stem}-{damage.offset}.bad"
                    aside = self._directory / QUARANTINE / name
                    segment.set_aside(damage, aside)
                    done.append(f"{place} are damaged and were moved to {aside}.")
            if any(damage.offset + damage.size < segment.end for damage in damages):
                if live := self._live(segment):  # else the segment is deleted
                    segment.rewrite(live)
            elif damages:
                segment.cut(damages[-1].offset)
        except StorageError as error:
            skipped = f"are damaged and were skipped: {error.message}"
            done = [f"{place} {skipped}" for place in places.values()]
        self.recovered += done

    def _live(self, segment: Segment) -> list[str]:
        """Return the keys whose records in a segment count."""
        return [key for key in segment.records if self._index.get(key) is segment]

    def _forget(self, key: str) -> Segment | None:
        """Drop a key from the index; return the segment that held it."""
        self._unsynced.pop(key, None)
        return self._index.pop(key, None)

    def _collect(self) -> None:
        """Delete the segments in which nothing counts.

        Raises:
            StorageError: one could not be deleted; the next call begins with it.
        """
        held = set(self._index.values())
        for segment in [s for s in self._segments if s not in held]:
            with storage_errors("delete", segment.path):
                segment.close()
                segment.path.unlink(missing_ok=True)
            self._segments.remove(segment)

    # --- use --------------------------------------------------------------------------------

    def append(self, key: str, *body: Piece) -> None:
        """Add a record, its body in pieces; durable after the next `sync`.

        Raises:
            AlreadyHave: the key exists already; the first record counts.
            DiskFull, StorageError: no record was added, and the spool stays usable.
        """
        assert 0 < len(key.encode()) <= MAX_KEY_BYTES, "a key has 1 to 200 bytes"
        with self._guard:
            if key in self._index:
                raise AlreadyHave(f"{key!r} is in the spool already; the first one counts.")
            segment = self._segments[-1] if self._segments else None
            if segment is None or not segment.open_end:
                number = segment.number + 1 if segment else 1
                segment = Segment.create(self._directory, number)
                self._segments.append(segment)
                self._name_unsynced = True
            try:
                segment.append(RecordKind.DATA, key, *body)
            except StorageError:
                if segment.records:  # it may have the largest size that a file may have here
                    segment.open_end = False
                raise
            self._index[key] = segment
            self._unsynced[key] = None

    def end_round(self) -> None:
        """Let the next record begin a segment."""
        with self._guard:
            for segment in self._segments:
                segment.open_end = False

    def get(self, key: str) -> bytes:
        """Return the body of a record, durable or not.

        Raises:
            CorruptFile: the record was damaged, or is missing (see ``quarantine/``).
            StorageError: it cannot be read.
        """
        with self._guard:  # a purge moves records
            segment = self._segment(key)
            return segment.read(segment.records[key])

    def open(self, key: str, reader: Callable[[FilePart], _T]) -> _T:
        """Let a reader open the body of a record, which it reads later and authenticates.

        Raises:
            CorruptFile: the record was damaged, or is missing (see ``quarantine/``).
        """
        with self._guard:  # a purge moves records, but an open file stays as it is
            segment = self._segment(key)
            return reader(segment.body(segment.records[key]))

    def _segment(self, key: str) -> Segment:
        if segment := self._index.get(key):
            return segment
        raise CorruptFile(
            f"the spool {self._directory} has no record {key!r}: it was damaged or removed.",
            action=f"Look into {QUARANTINE}/ there; its sender must send it again.",
        )

    def __contains__(self, key: object) -> bool:
        """Return True if a key's record is durable, so that it may be acknowledged."""
        return key in self._index and key not in self._unsynced

    def keys(self) -> list[str]:
        """Return the keys of all durable records, oldest first."""
        with self._guard:
            return [key for key in self._index if key not in self._unsynced]

    def remove(self, keys: Iterable[str]) -> None:
        """Remove records; unknown keys are ignored. Segments in which nothing counts are deleted.

        A segment that loses a record takes no further ones: so a sender that is refused again and
        again does not fill one with what does not count.

        Raises:
            StorageError: a segment could not be deleted; the next removal tries again.
        """
        with self._guard:
            for key in keys:
                if segment := self._forget(key):
                    segment.open_end = False
            self._collect()

    def purge(self, keys: Iterable[str]) -> int:
        """Remove records and their bytes, those of records removed before too; durable at once.

        What was damaged goes as well: it may hold a part of them, which nothing can tell.

        Returns the number of keys that existed.

        Raises:
            DiskFull, StorageError: some bytes may still be there; call it again.
        """
        wanted, found = set(keys), set[str]()
        with self._guard:
            for segment in self._segments:
                if victims := wanted & segment.records.keys():
                    found |= victims
                    for key in victims:
                        self._forget(key)
                    segment.open_end = False
                    if live := self._live(segment):
                        segment.rewrite(live)
            self._collect()
            damaged = self._directory / QUARANTINE
            if wanted and damaged.exists():
                with storage_errors("remove", damaged):
                    shutil.rmtree(damaged)
            with storage_errors("sync", self._directory):  # also for a call that failed here
                sync_directory(self._directory)
        return len(found)

    # --- durability -------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything appended so far durable: one fdatasync for the whole batch.

        Raises:
            DiskFull, StorageError: all records appended since the last good sync are lost,
                including those appended while this sync ran; append them again.
        """
        fds: list[int] = []
        batch: list[str] = []
        try:
            with self._guard, storage_errors("sync", self._directory):
                batch = list(self._unsynced)
                error, self._failed = self._failed, None
                if error is not None:
                    raise error
                work = [(segment, segment.end) for segment in self._dirty()]
                new_name, self._name_unsynced = self._name_unsynced, False
                # Duplicates are valid even after a deletion.
                fds.extend(os.dup(segment.descriptor) for segment, _ in work)
            with storage_errors("sync", self._directory):
                for fd in fds:
                    sync_data(fd)
                if new_name:
                    sync_directory(self._directory)
        except StorageError as failure:
            with self._guard:
                if set(self._unsynced) - set(batch):
                    self._failed = failure
                self._drop_unsynced()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        with self._guard:
            for key in batch:
                self._unsynced.pop(key, None)
            for segment, end in work:
                segment.synced = max(segment.synced, end)

    def _dirty(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.synced < segment.end]

    def _drop_unsynced(self) -> None:
        """Drop unsynced records: after a failed sync the kernel may have dropped their bytes."""
        for key in list(self._unsynced):
            self._forget(key)
        for segment in self._dirty():
            segment.open_end = False
            with contextlib.suppress(StorageError):  # what is left counts for nobody
                segment.cut(segment.synced)

    def close(self) -> None:
        """Sync, then close all files."""
        try:
            self.sync()
        finally:
            for segment in self._segments:
                with contextlib.suppress(OSError):
                    segment.close()
