"""The spool: acknowledged updates, kept in append-only segments until they are removed.

Append records as they arrive, sync once for all of them, then acknowledge. Any thread may do each,
and a sync waits for the disk without blocking the others. `get` is for keys that no thread removes
meanwhile. Bodies are opaque here.

Dead bytes do not accumulate: a segment that is mostly dead accepts no more records, so that soon
none of its records counts; otherwise the rest is copied and the segment deleted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fcil_protocol.errors import AlreadyHave, CorruptFile, DiskFull, StorageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_data, sync_directory
from fcil_protocol.storage.segment import MAX_KEY_BYTES, Damage, RecordKind, RecordSpan, Segment
from fcil_protocol.storage.segment_list import SegmentList

SEGMENT_BYTES = 64 << 20
QUARANTINE = "quarantine"
_ROLL_AT = 1  # dead bytes per live byte above which a segment accepts no more records
_COPY_AT = 3  # and above which its live records are copied elsewhere


class _RecordPlace(NamedTuple):
    segment: Segment
    record: RecordSpan


class Spool:
    """Records by key, in a directory of segments.

    Opening checks every byte: the torn end of a killed process is cut off, damaged records are
    moved to ``quarantine/``, and the rest is made durable.

    Args:
        directory: created if it does not exist; for one process at a time.
        segment_bytes: a new segment begins when this would be exceeded; a larger record has
            a segment to itself.

    Attributes:
        recovered: one sentence for each repair at opening.

    Raises:
        StorageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.recovered: list[str] = []
        self._directory = directory
        self._guard = threading.Lock()
        self._segments = SegmentList(directory, segment_bytes)
        self._index: dict[str, _RecordPlace] = {}
        self._unsynced: dict[str, None] = {}  # keys that a power cut could take
        self._failed: StorageError | None = None  # error of a sync, for records appended during it
        with storage_errors("create", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for segment in Segment.all_in(directory):
            self._load(segment)
        with storage_errors("sync", directory):
            sync_directory(directory)
        self._segments.collect()

    # --- opening ----------------------------------------------------------------------------

    def _load(self, segment: Segment) -> None:
        self._segments.add(segment)
        damages = []
        for found in segment.scan():
            if isinstance(found, Damage):
                damages.append(found)
            elif found.kind is RecordKind.DATA:
                self._bury(found.key, segment)  # a copy replaces its original
                self._index[found.key] = _RecordPlace(segment, found)
                segment.live += found.size
            elif found.kind is RecordKind.REMOVED:
                self._bury(found.key, segment)
        for damage in damages:
            self._repair(segment, damage)
        with storage_errors("sync", segment.path):
            # A killed process may have appended without a sync; live records must be durable.
            sync_data(segment.descriptor)
        segment.synced = segment.end
        segment.close()

    def _repair(self, segment: Segment, damage: Damage) -> None:
        place = f"{damage.size} bytes at {damage.offset} of {segment.path}"
        aside = self._directory / QUARANTINE / f"{segment.path.stem}-{damage.offset}.bad"
        try:
            segment.repair(damage, aside)
        except StorageError as error:
            segment.open_end = False  # no record may follow bytes that stay
            self.recovered.append(f"{place} are damaged and were skipped: {error.message}")
            return
        if damage.torn:
            self.recovered.append(f"{place}, half a record that was never durable, were cut off.")
        else:
            self.recovered.append(f"{place} are damaged and were moved to {aside}.")

    def _forget(self, key: str) -> Segment | None:
        """Drop a key from the index; return the segment that held it."""
        place = self._index.pop(key, None)
        self._unsynced.pop(key, None)
        if place is None:
            return None
        place.segment.live -= place.record.size
        return place.segment

    def _bury(self, key: str, segment: Segment) -> None:
        """Record that ``segment`` removes the key, or replaces its record."""
        holder = self._forget(key)
        if holder is not None and holder is not segment:
            segment.buried.add(holder.number)

    # --- use --------------------------------------------------------------------------------

    def append(self, key: str, *body: bytes | memoryview) -> None:
        """Add a record, its body in pieces; durable after the next `sync`.

        Raises:
            AlreadyHave: the key exists already; the first record counts.
            DiskFull, StorageError: no record was added, and the spool stays usable.
        """
        name_bytes = len(key.encode())
        assert 0 < name_bytes <= MAX_KEY_BYTES, "a key has 1 to 200 bytes"
        with self._guard:
            if key in self._index:
                raise AlreadyHave(f"{key!r} is in the spool already; the first one counts.")
            size = name_bytes + sum(len(piece) for piece in body)
            try:
                segment = self._segments.open_for(size)
                record = segment.append(RecordKind.DATA, key, *body)
            except DiskFull:
                wasteful = sorted(self._segments.wasteful(0), key=lambda segment: segment.live)
                if not self._empty(wasteful[:1]):
                    raise
                segment = self._segments.open_for(size)
                record = segment.append(RecordKind.DATA, key, *body)
            segment.live += record.size
            self._index[key] = _RecordPlace(segment, record)
            self._unsynced[key] = None
            self._segments.dirty[segment.number] = segment

    def get(self, key: str, *, check: bool = True) -> bytes:
        """Return the body of a record, durable or not.

        Args:
            key: the record's.
            check: hash the body; False for one that its reader authenticates anyway.

        Raises:
            CorruptFile: the record was damaged, or is missing (see ``quarantine/``).
            StorageError: it cannot be read.
        """
        while (place := self._index.get(key)) is not None:
            try:
                return place.segment.read(place.record, check=check)
            except StorageError:
                if self._index.get(key) is place:
                    raise
                # It was copied to another segment meanwhile.
        raise CorruptFile(
            f"the spool {self._directory} has no record {key!r}: it was damaged or removed.",
            action=f"Look into {QUARANTINE}/ there; its sender must send it again.",
        )

    def __contains__(self, key: object) -> bool:
        """Return True if a key's record is durable, so that it may be acknowledged."""
        return key in self._index and key not in self._unsynced

    def keys(self) -> list[str]:
        """Return the keys of all durable records in file order: oldest first, copied ones last."""
        with self._guard:
            durable = {k: place for k, place in self._index.items() if k not in self._unsynced}
        return sorted(durable, key=lambda k: (durable[k].segment.number, durable[k].record.offset))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove records; unknown keys are ignored. Segments without live records are deleted.

        A power cut before the next `sync` may bring some of them back.

        Raises:
            DiskFull, StorageError: keys whose removal could not be recorded still exist.
        """
        with self._guard:
            victims = {key: self._index[key] for key in keys if key in self._index}
            unsynced = [key for key in victims if key in self._unsynced]
            for key in victims:
                self._forget(key)
            try:
                # First those that need no removal record, so that a full disk gets some room.
                self._segments.collect()
                for key, place in list(victims.items()):
                    if place.segment in self._segments:
                        self._note_removal(key, place.segment)
                    del victims[key]
            except StorageError:
                for key, place in victims.items():
                    if place.segment in self._segments:
                        self._index[key] = place
                        place.segment.live += place.record.size
                self._unsynced.update(dict.fromkeys(k for k in unsynced if k in self._index))
                raise
            last = self._segments.last
            if last is not None and self._segments.mostly_dead(last, _ROLL_AT):
                last.open_end = False
            self._empty(self._segments.wasteful(_COPY_AT))

    def purge(self, keys: Iterable[str]) -> int:
        """Remove records and, if the disk has room to copy the others, their bytes at once.

        Returns the number of keys that existed. Raises as `remove` and `sync` do.
        """
        victims = [key for key in keys if key in self._index]
        if victims:
            self.remove(victims)
            self.sync()
            with self._guard:
                self._empty([s for s in self._segments if s.number not in self._segments.dirty])
        return len(victims)

    def _note_removal(self, key: str, holder: Segment) -> None:
        segment = self._segments.open_for(len(key.encode()))
        segment.append(RecordKind.REMOVED, key)
        self._segments.dirty[segment.number] = segment
        if holder is not segment:
            segment.buried.add(holder.number)

    # --- dead bytes -------------------------------------------------------------------------

    def _empty(self, wasteful: list[Segment]) -> bool:
        """Copy the live records of these segments into a new one, sync it, delete the old ones.

        A kill leaves both or the copy; if both exist, the copy counts. After a failure the spool is
        as before: no record is lost, and no room is gained.
        """
        if not wasteful:
            return False
        numbers = {segment.number for segment in wasteful}
        places = {k: place for k, place in self._index.items() if place.segment.number in numbers}
        try:
            target, copies = self._copy(places)
            for key, copy in copies.items():
                target.live += copy.record.size
                target.buried.add(places[key].segment.number)
                self._index[key] = copy  # at once: `in` and `get` read the index without the guard
                places[key].segment.live -= copy.record.size
            self._segments.collect()
        except StorageError:
            return False
        return True

    def _copy(self, places: dict[str, _RecordPlace]) -> tuple[Segment, dict[str, _RecordPlace]]:
        """Copy records into a new segment, durable when this returns."""
        for segment in self._segments:
            segment.open_end = False  # records appended from now on follow the copies
        target = self._segments.new()
        copies = {}
        try:
            for key, place in places.items():
                body = place.segment.read(place.record)
                copies[key] = _RecordPlace(target, target.append(RecordKind.DATA, key, body))
            with storage_errors("sync", target.path):
                sync_data(target.descriptor)
                sync_directory(self._directory)
        except StorageError:
            target.open_end = False  # it has no live record, so it is deleted
            self._segments.collect()
            raise
        target.synced = target.end
        return target, copies

    # --- durability -------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything appended so far durable: one fdatasync for the whole batch.

        Raises:
            DiskFull, StorageError: all records appended since the last good sync are lost,
                including those appended while this sync ran; append them again.
        """
        with self._guard:
            if self._failed is not None:
                error, self._failed = self._failed, None
                self._drop_unsynced()
                raise error
            batch = list(self._unsynced)
            work = [(segment, segment.end) for segment in self._segments.dirty.values()]
            with storage_errors("sync", self._directory):
                fds = self._duplicates()
            names, self._segments.names_dirty = self._segments.names_dirty, False
        try:
            with storage_errors("sync", self._directory):
                for fd in fds:
                    sync_data(fd)
                if names:
                    sync_directory(self._directory)
        except StorageError as error:
            with self._guard:
                if set(self._unsynced) - set(batch):
                    self._failed = error
                self._drop_unsynced()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        with self._guard:
            for key in batch:
                self._unsynced.pop(key, None)
            self._segments.settle(work)

    def _duplicates(self) -> list[int]:
        try:
            return self._segments.duplicates()
        except (OSError, StorageError):
            self._drop_unsynced()
            raise

    def _drop_unsynced(self) -> None:
        """Drop unsynced records: after a failed sync the kernel may have dropped their bytes."""
        for key in list(self._unsynced):
            self._forget(key)
        self._segments.cut_unsynced()

    def close(self) -> None:
        """Sync, then close all files."""
        try:
            self.sync()
        finally:
            for segment in self._segments:
                with contextlib.suppress(OSError):
                    segment.close()
