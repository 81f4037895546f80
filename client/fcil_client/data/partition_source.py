"""One client's images of a partitioned data set, as if they were the complete set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fcil_adapters.images.decoding import ImageEntry, ImageSource, Listing, open_source
from fcil_client.data import partition_file
from fcil_client.data.partition_file import Partition, listing_digest
from fcil_client.data.split import SIDES, Fractions
from fcil_protocol.errors import DataError
from fcil_protocol.process.terminal import command


class SharedData:
    """A data set that several clients share: listed once, checked against its partition.

    Args:
        source: the complete data set.
        partition: the partition that divides it.
        entries: its images, if they were checked before.

    Raises:
        DataError: without entries: it is not the data set of the partition.
    """

    def __init__(
        self,
        source: ImageSource,
        partition: Partition,
        entries: Mapping[str, ImageEntry] | None = None,
    ) -> None:
        self.source = source
        self.partition = partition
        self._entries = self._list_checked() if entries is None else entries

    def _list_checked(self) -> dict[str, ImageEntry]:
        source, partition = self.source, self.partition
        listing = source.listing()
        if listing_digest(listing) != partition.source.digest:
            raise DataError(
                f"{source.path} is not the data set that the partition was made from: expected "
                f"{partition.source.images} images whose listing has the digest "
                f"{partition.source.digest[:12]}, got {len(listing.entries)} images with "
                f"{listing_digest(listing)[:12]}.",
                action="Give the data that fcil-client split was given, or make the partition "
                "again.",
            )
        return {entry.name: entry for entry in listing.entries}

    def relisted(self) -> SharedData:
        """Return the data set with its files' present sizes and times.

        An image that is gone keeps its entry, and reading it fails; a new one is no client's.

        Raises:
            DataError: it cannot be listed.
        """
        source = open_source(self.source.path)
        now = {e.name: e for e in source.listing().entries if e.name in self._entries}
        return SharedData(source, self.partition, {**self._entries, **now})

    def are(self, data: Path, partition: Partition) -> bool:
        """Return True if this is the given partition of the given data."""
        return self.source.path == data and self.partition.digest == partition.digest

    def slot(self, number: int) -> ImageSource:
        """Return the images of one client; closing it leaves the data set open.

        Raises:
            UsageError: there is no such slot.
        """
        return _SlotSource(self, number, owned=False)

    def entries(self, slot: int) -> tuple[ImageEntry, ...]:
        """Return one client's images by name, with the side that the partition gives them.

        Raises:
            DataError: the partition names an image that is missing.
        """
        self._check(slot)
        found = [
            replace(self._entries[name], part=side)
            for side in SIDES
            for name in getattr(self.partition, side)(slot)
        ]
        return tuple(sorted(found, key=lambda entry: entry.name))

    def _check(self, slot: int) -> None:
        held = frozenset().union(*(getattr(self.partition, side)(slot) for side in SIDES))
        missing = held - self._entries.keys()
        if missing:  # of a hand-written file
            raise DataError(
                f"the partition gives slot {slot} the image {min(missing)!r}, which is not in "
                f"{self.source.path}.",
                action="Make the partition again, with the options of before: "
                f"{command('fcil-client', 'split', '--data', self.source.path)}",
            )

    def close(self) -> None:
        """Close the source."""
        self.source.close()


class _SlotSource(ImageSource):
    """Images of one slot; files are read through the complete source."""

    def __init__(self, parts: SharedData, slot: int, *, owned: bool) -> None:
        super().__init__(parts.source.path)
        parts.partition.check_slot(slot)
        self._parts = parts
        self._slot = slot
        self._owned = owned

    def listing(self) -> Listing:
        """Return the slot's images; the data set is not listed again."""
        entries = self._parts.entries(self._slot)
        if not entries:
            raise DataError(f"slot {self._slot} of the partition holds no image of {self.path}.")
        return Listing(entries, ())

    def read(self, entry: ImageEntry) -> bytes:
        """Return a file's bytes."""
        return self._parts.source.read(entry)

    def unchanged(self, entry: ImageEntry) -> bool:
        """Return True if the file is unchanged since the data set was listed."""
        return self._parts.source.unchanged(entry)

    def close(self) -> None:
        """Close the data set, if only this client uses it."""
        if self._owned:
            self._parts.close()


def part_source(source: ImageSource, partition: Partition, slot: int) -> ImageSource:
    """Return the images of one client of a partition; closing it closes ``source``.

    Raises:
        DataError: it is not the data set of the partition.
        UsageError: there is no such slot.
    """
    return _SlotSource(SharedData(source, partition), slot, owned=True)


def open_data(
    data: Path, partition: Path | None = None, slot: int = -1
) -> tuple[ImageSource, Fractions]:
    """Open a client's images: all of ``data``, or a slot's share of it.

    Returns:
        The source, and the shares by which a scan divides images without a side.

    Raises:
        DataError, CorruptFile, StorageError, UsageError: as documented for its parts.
    """
    if partition is None:
        return open_source(data), Fractions()
    loaded = partition_file.load(partition)
    source = open_source(data)
    try:
        return part_source(source, loaded, slot), loaded.fractions
    except BaseException:
        source.close()
        raise
