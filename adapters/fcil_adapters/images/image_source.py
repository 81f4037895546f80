"""The interface of all sources of images, and what their readers share.

A source lists images with a label and reads one at a time. All that it reads is input: names lead
nowhere, sizes are bounded, and an image that cannot be used is left out with a sentence.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar, Literal

from fcil_protocol.errors import DataError
from fcil_protocol.payloads.schema import class_key, class_name_fault, normalise_class_name
from fcil_protocol.process.terminal import count_of

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
)
# Of image formats that no decoder here reads; other files beside images stay unmentioned.
UNREAD_SUFFIXES = frozenset((".heic", ".heif", ".avif", ".jp2", ".jxl", ".raw", ".dng"))
MAX_FILE_BYTES = 256 << 20  # above any photograph; below the memory of a small device
LAYOUT = (
    "Lay images out as FOLDER/<class>/<image>, or FOLDER/train/<class>/<image> and "
    "FOLDER/test/<class>/<image>, or as a zip file of either. docs/data.md has further forms."
)

SourcePart = Literal["train", "select", "test"]

_SIDE = re.compile(r"(?:^|[^a-z0-9])(train|test)(?![a-z0-9])")


@dataclass(frozen=True)
class ImageEntry:
    """One image file of a source.

    Attributes:
        name: path inside the source, with ``/``.
        class_name: normalised name of its class.
        part: train or test, by the layout or a partition; None without either.
        size: bytes.
        stamp: changes when the file changes: modification time in ns of the file that holds it, or
            the CRC-32 of a zip member.
    """

    name: str
    class_name: str
    part: SourcePart | None
    size: int
    stamp: int


@dataclass(frozen=True)
class Listing:
    """The contents of a source: its images by name, and one sentence per thing left out."""

    entries: tuple[ImageEntry, ...]
    faults: tuple[str, ...]


class ImageSource(ABC):
    """Read access to labelled images.

    Attributes:
        form: what it is, for people.
    """

    form: ClassVar[str] = "source"

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def listing(self) -> Listing:
        """List the source as it is now.

        Raises:
            DataError: it cannot be read, or holds no image with a class.
        """

    def entries(self) -> Iterator[ImageEntry]:
        """Yield the images of `listing`, by name."""
        yield from self.listing().entries

    @abstractmethod
    def read(self, entry: ImageEntry) -> bytes:
        """Return a file's bytes; may be called from several threads, and before `listing`.

        Raises:
            DataError: the file is gone, unreadable or too large.
        """

    @abstractmethod
    def unchanged(self, entry: ImageEntry) -> bool:
        """Return True if the file, unread, still looks as it did when listed."""

    def close(self) -> None:
        """Close the files that the source holds open."""
        return


# --- reading --------------------------------------------------------------------------------


def read_file(path: Path, name: str) -> bytes:
    """Return the bytes of the file at ``path``, which ``name`` is in its source.

    Raises:
        DataError: it is gone, unreadable or too large.
    """
    try:
        with path.open("rb") as file:
            # Python allocates as much as the call requests.
            size = min(os.fstat(file.fileno()).st_size, MAX_FILE_BYTES)
            return bounded(file.read(size + 1), name)
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from error


def read_bounded(file: IO[bytes], name: str) -> bytes:
    """Return all bytes of an open file that does not know its size.

    Raises:
        DataError: there are too many.
    """
    return bounded(file.read(MAX_FILE_BYTES + 1), name)


def bounded(data: bytes, name: str) -> bytes:
    """Return an image's bytes.

    Raises:
        DataError: there are too many.
    """
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"image {name!r} has more than {MAX_FILE_BYTES} bytes.")
    return data


def oversize(name: str, size: int) -> str:
    """Return a sentence if an image has too many bytes; else an empty text."""
    if size <= MAX_FILE_BYTES:
        return ""
    return f"image {name!r} has {size} bytes, more than {MAX_FILE_BYTES}"


def same_file(path: Path, size: int | None, stamp: int) -> bool:
    """Return True if a file has this modification time (ns) and, if given, this size."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return status.st_mtime_ns == stamp and size in (None, status.st_size)


def unreadable(name: str, error: Exception) -> DataError:
    """Return the error of an image that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"image {name!r} cannot be read ({str(reason)[:120]}).")


# --- names and labels -----------------------------------------------------------------------


def is_image(name: str) -> bool:
    """Return True if a name has the suffix of an image."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def hidden(parts: tuple[str, ...]) -> bool:
    """Return True if a path is of a file that no source reads."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def suffix_of(name: str) -> str:
    """Return a suffix for a copy of an image: folders take no file without one.

    An image of a list may have none; the content decides its format, under any suffix.
    """
    return PurePosixPath(name).suffix.lower() if is_image(name) else ".png"


def side_of(name: str) -> SourcePart | None:
    """Return the side that the name of a file of many images says, such as ``train-0001.tar``."""
    found = _SIDE.findall(name.lower())
    return None if not found else "train" if found[-1] == "train" else "test"


class ClassNames:
    """Class names met so far, compared like class names of the federation.

    Args:
        remedy: what to do about two labels of one class.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._firsts: dict[str, str] = {}
        self._known: dict[str, tuple[str, str]] = {}

    def of(self, label: str) -> tuple[str, str]:
        """Return the class of a label, and why it has none; one of them is empty."""
        if label not in self._known:
            self._known[label] = self._find(label)
        return self._known[label]

    def _find(self, label: str) -> tuple[str, str]:
        name = normalise_class_name(label)
        if fault := class_name_fault(name):
            return "", fault
        if "/" in name or name.startswith("."):  # `split --export` makes folders
            return "", "a class name must be one for a folder: without /, and not hidden by a dot"
        first = self._firsts.setdefault(class_key(name), label)
        if first != label:
            return "", f"it names the same class as {first!r}; {self._remedy}"
        return name, ""


def labelled(
    entries: Iterable[ImageEntry],
    faults: list[str],
    path: Path,
    place: Callable[[ImageEntry], str] = lambda entry: f"image {entry.name!r}",
) -> Listing:
    """Return the listing of images whose class names are still labels as written.

    Args:
        entries: with distinct names.
        faults: what was left out before; further sentences are added.
        path: of the source.
        place: says where the label of an image is, such as ``line 3``.

    Raises:
        DataError: no image has a class.
    """
    names, left = ClassNames("write both alike"), LeftOut()
    found = []
    # The spelling of the training images counts, wherever the source lists them.
    for entry in sorted(entries, key=lambda entry: entry.part == "test"):
        name, fault = names.of(entry.class_name)
        if fault:
            label = entry.class_name[:200]
            left.add(place(entry), f"its label {label!r} cannot be used: {fault}")
        else:
            found.append(replace(entry, class_name=name))
    faults.extend(left.sentences())
    if not found:
        why = f" ({faults[0]})" if faults else ""
        raise DataError(
            f"{path} holds no images with labels{why}.", action="docs/data.md shows each form."
        )
    found.sort(key=lambda entry: entry.name)
    return Listing(tuple(found), tuple(faults))


class LeftOut:
    """Things that a source leaves out: one sentence for each reason."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}  # reason -> the first thing, and their number

    def add(self, thing: str, reason: str) -> None:
        """Count a thing, such as ``line 3``."""
        first, count = self._found.get(reason, (thing, 0))
        self._found[reason] = first, count + 1

    def sentences(self) -> Iterator[str]:
        """Yield the sentences."""
        for reason, (first, count) in self._found.items():
            others = f" and {count - 1} more are" if count > 1 else " is"
            yield f"{first}{others} left out: {reason}"


class OtherFormats:
    """Files in image formats that are not read; a folder of nothing else is named.

    Args:
        holder: what holds the files.
    """

    def __init__(self, holder: str = "folder") -> None:
        self._holder = holder
        self._with_images: set[tuple[str, ...]] = set()
        self._found: dict[tuple[str, ...], Counter[str]] = {}  # folder -> suffixes

    def see(self, parts: tuple[str, ...]) -> None:
        """Take the path of a file of any kind."""
        suffix = PurePosixPath(parts[-1]).suffix.lower() if parts else ""
        if suffix in IMAGE_SUFFIXES:
            self._with_images.add(parts[:-1])
        elif suffix in UNREAD_SUFFIXES and not hidden(parts):
            self._found.setdefault(parts[:-1], Counter())[suffix] += 1

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each holder without images, and one for all others."""
        beside, left = Counter[str](), LeftOut()
        for folder, suffixes in sorted(self._found.items()):
            if folder in self._with_images:
                beside += suffixes
            else:
                name = "/".join(folder) or "."
                left.add(
                    f"{self._holder} {name[:200]!r}", f"no image but files {_unread(suffixes)}"
                )
        yield from left.sentences()
        if beside:
            count = count_of(beside.total(), "file")
            yield f"left out: {count} beside the images {_unread(beside)}"


def _unread(suffixes: Iterable[str]) -> str:
    names, known = ", ".join(sorted(suffixes)), ", ".join(sorted(IMAGE_SUFFIXES))
    return f"in formats that are not read ({names}); images are {known}"
