"""WebDataset shards: tar files with an image ``KEY.jpg`` and its label ``KEY.cls``, read in place.

A label is the text of ``KEY.cls``, or ``label`` in ``KEY.json``: a name, or a number, which is then
the name. The name of a shard may say its side, such as ``train-0000.tar``.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fcil_adapters.images.image_source import (
    IMAGE_SUFFIXES,
    UNREAD_SUFFIXES,
    ImageEntry,
    ImageSource,
    LeftOut,
    Listing,
    OtherFormats,
    SourcePart,
    labelled,
    oversize,
    side_of,
    unreadable,
)
from fcil_adapters.images.tar_index import DamagedTar, TarMember, members
from fcil_protocol.errors import DataError

SUFFIX = ".tar"
MAX_SHARDS = 100_000
MAX_LABEL_BYTES = 64 << 10
_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_LABELS = ("cls", "json")
_SUFFIXES = IMAGE_SUFFIXES | UNREAD_SUFFIXES


def expanded(path: Path) -> list[Path]:
    """Return the paths that a pattern such as ``shard-{0000..0003}.tar`` names; else the path.

    A file or folder of exactly this name comes first.

    Raises:
        DataError: a range runs backwards, or there are too many.
    """
    if not _RANGE.search(path.name) or path.exists():
        return [path]
    names = [path.name]
    while match := _RANGE.search(names[0]):
        first, last = match.groups()
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
        count = int(last) - int(first) + 1
        if not 0 < count * len(names) <= MAX_SHARDS:
            raise DataError(
                f"{match[0]} in {path} must rise, and name at most {MAX_SHARDS} files.",
                action="Write for instance 'shard-{0000..0003}.tar', in quotes.",
            )
        numbers = [str(n).zfill(width) for n in range(int(first), int(last) + 1)]
        names = [_RANGE.sub(number, name, count=1) for name in names for number in numbers]
    return [path.with_name(name) for name in names]


def shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder, by name; none if it has folders, as one of classes has."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
            if any(entry.is_dir() for entry in entries):
                return []
    except OSError:  # its listing reports it
        return []
    return sorted(folder / e.name for e in entries if e.name.lower().endswith(SUFFIX))


@dataclass(slots=True)
class _Sample:
    """An image and its labels in a shard; a label is None where there is none."""

    image: TarMember | None = None
    cls: str | None = None
    json: str | None = None

    @property
    def label(self) -> str | None:
        """The class's name as written."""
        return self.json if self.cls is None else self.cls


class ShardSource(ImageSource):
    """A tar file, a folder of them, or those that a pattern names."""

    form = "set of shards"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._root = path if path.is_dir() else path.parent
        self._indexes: dict[str, dict[str, TarMember]] = {}  # shard -> member's name -> place
        self._lock = threading.Lock()

    def listing(self) -> Listing:
        """List the shards as they are now; of a damaged one, the members before the damage."""
        shards = shards_in(self.path) if self.path.is_dir() else expanded(self.path)
        sides = {shard.name: side_of(shard.name) for shard in shards}
        left, others, faults = LeftOut(), OtherFormats("shard"), list[str]()
        entries: list[ImageEntry] = []
        for shard in shards:
            side = sides[shard.name]
            if side is None and any(sides.values()):
                left.add(f"shard {shard.name!r}", "others are named train or test, and it is not")
                continue
            try:
                entries += self._entries(shard, side, left, others, faults)
            except OSError as error:
                left.add(f"shard {shard.name!r}", f"it cannot be read ({error.strerror})")
        return labelled(entries, [*left.sentences(), *others.sentences(), *faults], self.path)

    def read(self, entry: ImageEntry) -> bytes:
        """Return a member's bytes."""
        shard, _, name = entry.name.partition("/")
        try:
            member = self._index(shard)[name]
            if too_large := oversize(entry.name, member.size):
                raise DataError(f"{too_large}.")
            with (self._root / shard).open("rb") as file:
                file.seek(member.offset)
                data = file.read(member.size)
        except (OSError, KeyError, ValueError) as error:
            raise unreadable(entry.name, error) from error
        if len(data) < member.size:
            raise DataError(f"image {entry.name!r} cannot be read (its shard ends early).")
        return data

    def unchanged(self, entry: ImageEntry) -> bool:
        """Compare the modification time of the shard, and the size of the member."""
        shard, _, name = entry.name.partition("/")
        try:
            stamp = (self._root / shard).stat().st_mtime_ns
            return (self._index(shard)[name].size, stamp) == (entry.size, entry.stamp)
        except (OSError, KeyError, ValueError):
            return False

    def _index(self, shard: str) -> dict[str, TarMember]:
        """Return the places of a shard's images; a worker reads before anything is listed."""
        with self._lock:
            if shard not in self._indexes:
                samples, _ = self._samples(
                    self._root / shard, LeftOut(), OtherFormats(), labels=False
                )
                self._keep(shard, samples)
            return self._indexes[shard]

    def _keep(self, shard: str, samples: dict[str, _Sample]) -> None:
        images = (sample.image for sample in samples.values())
        self._indexes[shard] = {image.name: image for image in images if image is not None}

    def _entries(
        self,
        shard: Path,
        side: SourcePart | None,
        left: LeftOut,
        others: OtherFormats,
        faults: list[str],
    ) -> Iterator[ImageEntry]:
        status = shard.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe never ends
            left.add(f"shard {shard.name!r}", "it is no file")
            return
        stamp = status.st_mtime_ns
        samples, damage = self._samples(shard, left, others, labels=True)
        with self._lock:
            self._keep(shard.name, samples)
        if damage:
            faults.append(f"shard {shard.name!r} is used up to its damage: {damage}")
        for sample in samples.values():
            if sample.image is None:
                continue
            name = f"{shard.name}/{sample.image.name}"
            if too_large := oversize(name, sample.image.size):
                faults.append(too_large)
            elif sample.label is None:
                left.add(f"image {name!r}", "its key has no label, in a .cls or a .json")
            else:
                yield ImageEntry(name, sample.label, side, sample.image.size, stamp)

    def _samples(
        self, shard: Path, left: LeftOut, others: OtherFormats, *, labels: bool
    ) -> tuple[dict[str, _Sample], str]:
        """Return a shard's samples by key, and why it was not read to its end."""
        samples: dict[str, _Sample] = {}
        with shard.open("rb") as file:
            try:
                for member in members(file, os.fstat(file.fileno()).st_size):
                    name = member.name.removeprefix("./")
                    folder, slash, last = name.rpartition("/")
                    stem, _, kind = last.partition(".")
                    kind = kind.lower()
                    if stem and f".{kind}" in _SUFFIXES:
                        others.see((shard.name, last))
                    if not stem or (f".{kind}" not in IMAGE_SUFFIXES and kind not in _LABELS):
                        continue
                    if name.startswith("/") or ".." in name.split("/"):
                        left.add(f"member {name[:120]!r}", "it points outside the archive")
                        continue
                    sample = samples.setdefault(folder + slash + stem, _Sample())
                    if kind in _LABELS:
                        if labels:
                            file.seek(member.offset)
                            text = file.read(min(member.size, MAX_LABEL_BYTES))
                            setattr(sample, kind, _label(text, kind))
                    elif sample.image is None:
                        sample.image = member._replace(name=name)
                    else:
                        left.add(f"member {name[:120]!r}", "its key has an image already")
            except DamagedTar as error:
                return samples, str(error)
        return samples, ""


def _label(data: bytes, kind: str) -> str | None:
    """Return the class's name in a label's file; None if it has none."""
    try:
        if kind == "cls":
            return data.decode().strip()
        label = json.loads(data)["label"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else None
