"""The binary version of CIFAR-10 and CIFAR-100, read in place, record by record.

Its Python version, which other libraries download, is pickle: to read it is to run it. A record is
the label (CIFAR-100: coarse, then fine) and 32 x 32 pixels by channel. Each becomes a PPM, a header
before the pixels, so that its bytes and with them its digest are the same with every library.

Alex Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcil_adapters.images.image_source import (
    ImageEntry,
    ImageSource,
    LeftOut,
    Listing,
    SourcePart,
    labelled,
    same_file,
    unreadable,
)
from fcil_protocol.errors import DataError

_SIDE = 32  # pixels
_PIXELS = 3 * _SIDE * _SIDE  # bytes
_HEADER = f"P6\n{_SIDE} {_SIDE}\n255\n".encode()
_AT_ONCE = 1000  # records of a listing that are read together
_MAX_NAMES_BYTES = 64 << 10


@dataclass(frozen=True)
class CifarFiles:
    """The files of one of the two sets.

    Attributes:
        names: file with the name of each label, one a line.
        sides: files of records, each with its side.
        labels: labels of a record, in bytes; the last one counts.
    """

    names: str
    sides: Mapping[str, SourcePart]
    labels: int

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all files."""
        return (self.names, *self.sides)


_BATCHES: dict[str, SourcePart] = {f"data_batch_{n}.bin": "train" for n in range(1, 6)}
CIFAR_10 = CifarFiles("batches.meta.txt", {**_BATCHES, "test_batch.bin": "test"}, 1)
CIFAR_100 = CifarFiles("fine_label_names.txt", {"train.bin": "train", "test.bin": "test"}, 2)


def cifar_in(folder: Path) -> CifarFiles | None:
    """Return which of the two sets a folder holds completely, if one."""
    for files in (CIFAR_10, CIFAR_100):
        if all((folder / name).is_file() for name in files.all):
            return files
    return None


class CifarSource(ImageSource):
    """The unpacked archive of a binary version."""

    form = "CIFAR folder"

    def __init__(self, path: Path, files: CifarFiles) -> None:
        super().__init__(path)
        self._files = files
        self._record = files.labels + _PIXELS  # bytes

    def listing(self) -> Listing:
        """List the records as they are now."""
        left = LeftOut()
        names = self._names()
        entries = [e for file in self._files.sides for e in self._entries(file, names, left)]
        return labelled(entries, list(left.sentences()), self.path)

    def read(self, entry: ImageEntry) -> bytes:
        """Return a record as a PPM."""
        try:
            path, number = self._place(entry)
            with path.open("rb") as file:
                file.seek(number * self._record + self._files.labels)
                data = file.read(_PIXELS)
        except (OSError, ValueError) as error:
            raise unreadable(entry.name, error) from error
        if len(data) < _PIXELS:
            raise DataError(f"image {entry.name!r} cannot be read (its file ends early).")
        channels = np.frombuffer(data, np.uint8).reshape(3, -1)  # (3, 1024)
        return _HEADER + channels.T.tobytes()

    def unchanged(self, entry: ImageEntry) -> bool:
        """Compare the modification time of the file."""
        try:
            return same_file(self._place(entry)[0], None, entry.stamp)
        except ValueError:
            return False

    def _place(self, entry: ImageEntry) -> tuple[Path, int]:
        """Return the file of an image, and its number in it."""
        file, _, number = entry.name.partition("/")
        if file not in self._files.sides:
            raise ValueError("no such file")
        return self.path / file, int(number.removesuffix(".ppm"))

    def _names(self) -> list[str]:
        path = self.path / self._files.names
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_NAMES_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}).", action="Unpack the archive again."
            ) from error
        return text.split()

    def _entries(self, file: str, names: list[str], left: LeftOut) -> Iterator[ImageEntry]:
        path = self.path / file
        try:
            stamp, labels = path.stat().st_mtime_ns, self._labels(path, left)
        except OSError as error:
            left.add(f"file {file!r}", f"it cannot be read ({error.strerror})")
            return
        for number, label in enumerate(labels):
            name = f"{file}/{number:05d}.ppm"
            if label < len(names):
                size = len(_HEADER) + _PIXELS
                yield ImageEntry(name, names[label], self._files.sides[file], size, stamp)
            else:
                left.add(f"image {name!r}", f"its label has no name in {self._files.names}")

    def _labels(self, path: Path, left: LeftOut) -> bytes:
        """Return the label of each complete record."""
        found = []
        with path.open("rb") as file:
            while chunk := file.read(_AT_ONCE * self._record):
                whole = len(chunk) // self._record * self._record
                found.append(chunk[self._files.labels - 1 : whole : self._record])
                if whole < len(chunk):
                    left.add(f"the end of {path.name!r}", "the file ends within an image")
        return b"".join(found)
