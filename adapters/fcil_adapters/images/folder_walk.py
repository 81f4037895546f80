"""Walk of all folders below one, with links followed and each folder met once in a class."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

MAX_DEPTH = 32  # folders below the root
MAX_LINKS = 10_000  # links that are followed
SIDES = ("train", "test")  # their folders are classes, in layouts that have them

Identity = tuple[int, int]  # device and inode


def depth_below(root: Path, place: str) -> int:
    """Return how many folders a place is below a root."""
    return len(PurePath(place).relative_to(root).parts)


@dataclass(frozen=True, order=True)
class _Folder:
    """A folder to visit; places without links come first, then the less deep."""

    links: int
    depth: int
    parts: tuple[str, ...]
    above: frozenset[Identity] = field(compare=False)


class FolderWalk:
    """All folders below one, each once for each class; links are followed.

    Folders that link to each other lead to more paths than can be walked: nine such folders to a
    million. A folder that was already met in a class, or is an ancestor, is passed over there.

    Args:
        root: where the walk begins.
        watch: called for each name and each visit of a folder; what it raises ends the walk.

    Attributes:
        repeated: paths that were passed over because their folder was met already.
        deep: folders deeper than `MAX_DEPTH`.
        unreadable: errors of folders that cannot be read.
    """

    def __init__(self, root: Path, watch: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._watch = watch
        self._followed = 0
        self._met: set[tuple[tuple[str, ...], Identity]] = set()
        self._coming: list[_Folder] = []
        self.repeated: list[str] = []
        self.deep: list[str] = []
        self.unreadable: list[OSError] = []

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Yield each folder, by its names below the root, and the names of its files."""
        self._coming = [_Folder(0, 0, (), frozenset())]
        while self._coming:
            self._watch()  # here too: a folder that was met already shows no names
            place = heapq.heappop(self._coming)
            folder = self._root.joinpath(*place.parts)
            try:
                status = folder.stat()
                identity = (status.st_dev, status.st_ino)
                if not self._is_new(place, identity):
                    continue
                files = self._look(folder, place, place.above | {identity})
            except OSError as error:
                self.unreadable.append(error)
                continue
            yield place.parts, files

    def sentences(self) -> Iterator[str]:
        """Yield one sentence for each kind of passed-over folder."""
        for error in self.unreadable:
            yield f"folder {error.filename!r} cannot be read ({error.strerror})"
        if self.repeated:
            yield (
                f"{len(self.repeated)} folders are skipped, such as {self.repeated[0]!r}: links "
                "lead there a second time, or form a loop"
            )
        if self.deep:
            yield (
                f"{len(self.deep)} folders are skipped, such as {self.deep[0]!r}: they are more "
                f"than {MAX_DEPTH} folders deep"
            )

    def _is_new(self, place: _Folder, identity: Identity) -> bool:
        beside_sides = not place.parts or place.parts[0] not in SIDES
        key = (place.parts[: 1 if beside_sides else 2], identity)
        if key in self._met or identity in place.above:
            self.repeated.append("/".join(place.parts))
            return False
        self._met.add(key)
        return True

    def _look(self, folder: Path, place: _Folder, above: frozenset[Identity]) -> list[str]:
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._watch()
                if not _is_folder(entry):
                    files.append(entry.name)
                elif not entry.name.startswith("."):
                    self._later(place, entry, above)
        return files

    def _later(self, place: _Folder, entry: os.DirEntry[str], above: frozenset[Identity]) -> None:
        parts = (*place.parts, entry.name)
        if len(parts) > MAX_DEPTH:
            self.deep.append("/".join(parts))
            return
        is_link = entry.is_symlink()
        self._followed += is_link
        if self._followed > MAX_LINKS and is_link:
            self.repeated.append("/".join(parts))
            return
        heapq.heappush(self._coming, _Folder(place.links + is_link, len(parts), parts, above))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # an unreadable link: treated as a file, which reports it
        return False
