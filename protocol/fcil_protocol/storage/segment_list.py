"""The segments of a spool: open end, unsynced bytes, segments to delete.

It knows segments and the number of their live bytes, but no keys. Callers that change it hold the
spool's guard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fcil_protocol.errors import StorageError
from fcil_protocol.storage.atomic_files import storage_errors, sync_directory
from fcil_protocol.storage.segment import Segment

_LITTLE = 64  # 1 / this of a full segment may be dead before it counts as mostly dead


class SegmentList:
    """The segments in a directory, oldest first.

    Args:
        directory: folder of the segments.
        segment_bytes: a new segment begins when this would be exceeded.

    Attributes:
        dirty: those with unsynced bytes, by number.
        names_dirty: a segment file is new.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.dirty: dict[int, Segment] = {}
        self.names_dirty = False
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segments: dict[int, Segment] = {}  # oldest first
        self._next_number = 1  # never used twice while this object lives

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __contains__(self, segment: Segment) -> bool:
        return segment.number in self._segments

    # --- the end ----------------------------------------------------------------------------

    @property
    def last(self) -> Segment | None:
        """The newest segment."""
        return next(reversed(self._segments.values()), None)

    def add(self, segment: Segment) -> None:
        """Add an existing segment, later than all before it."""
        self._segments[segment.number] = segment
        self._next_number = segment.number + 1

    def new(self) -> Segment:
        """Create a new, empty segment at the end.

        Raises:
            DiskFull, StorageError: it cannot be created.
        """
        segment = Segment.create(self._directory, self._next_number)
        self._next_number += 1
        self._segments[segment.number] = segment
        self.names_dirty = True
        return segment

    def open_for(self, size: int) -> Segment:
        """Return the segment for the next record of this many bytes; raises like `new`."""
        last = self.last
        if last is not None and last.open_end:
            if last.end == 0 or last.end + size <= self._segment_bytes:
                return last
            last.open_end = False
        return self.new()

    # --- dead bytes -------------------------------------------------------------------------

    def mostly_dead(self, segment: Segment, times: int) -> bool:
        """Return True if it has over ``times`` dead bytes for each live one, and not just a few."""
        little = self._segment_bytes // _LITTLE
        return segment.dead > max(times * segment.live, little)

    def wasteful(self, times: int) -> list[Segment]:
        """Return segments that could be deleted if their few live records were elsewhere."""
        return [
            segment
            for segment in self._segments.values()
            if segment.live
            and self.mostly_dead(segment, times)
            and segment.number not in self.dirty
            and segment.buried.isdisjoint(self._segments)
        ]

    def collect(self) -> None:
        """Delete segments without live bytes, oldest first.

        A segment whose records remove some of another one outlives that one, on disk too: hence the
        sync after each.

        Raises:
            StorageError: one could not be deleted; the next call begins with it.
        """
        for segment in list(self._segments.values()):
            if segment.live or not segment.buried.isdisjoint(self._segments):
                continue
            with storage_errors("delete", segment.path):
                segment.close()
                segment.path.unlink(missing_ok=True)
                sync_directory(self._directory)
            del self._segments[segment.number]
            self.dirty.pop(segment.number, None)

    # --- durability -------------------------------------------------------------------------

    def duplicates(self) -> list[int]:
        """Return duplicate descriptors of the dirty ones, valid even after a deletion."""
        fds: list[int] = []
        try:
            fds.extend(os.dup(segment.descriptor) for segment in self.dirty.values())
        except (OSError, StorageError):
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def settle(self, work: list[tuple[Segment, int]]) -> None:
        """Record that segments are durable, each up to an offset."""
        for segment, end in work:
            segment.synced = max(segment.synced, end)
            if segment.synced == segment.end:
                self.dirty.pop(segment.number, None)
                if not segment.open_end:
                    segment.close()

    def cut_unsynced(self) -> None:
        """Drop all bytes that may not be durable; the cut segments accept no more records."""
        for segment in self.dirty.values():
            segment.cut(segment.synced)
            segment.open_end = False
            segment.close()
        self.dirty.clear()
