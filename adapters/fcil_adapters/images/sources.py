"""Sources of images: class folders, or a zip of them, read in place.

Layouts: ``<class>/<image>``, or ``train/<class>/<image>`` and ``test/<class>/<image>``. Images may
be deeper below their class folder. Hidden files and files without an image's suffix are passed
over.
"""

from __future__ import annotations

import contextlib
import stat
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from fcil_adapters.images.cifar_source import CifarSource, cifar_in
from fcil_adapters.images.folder_walk import FolderWalk
from fcil_adapters.images.image_source import (
    LAYOUT,
    ClassNames,
    ImageEntry,
    ImageSource,
    LeftOut,
    Listing,
    OtherFormats,
    SourcePart,
    hidden,
    is_image,
    oversize,
    read_bounded,
    read_file,
    same_file,
    unreadable,
)
from fcil_adapters.images.list_source import JsonListSource, ListSource, is_hub_list
from fcil_adapters.images.shard_source import ShardSource, expanded, shards_in
from fcil_protocol.errors import DataError

_UNPACKERS = {
    ".gz": "gunzip", ".tgz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd",
}  # fmt: skip
_LABELS_ELSEWHERE = (
    "in a folder, the folders are the classes. To take the labels of a list, name its file as the "
    "data (docs/data.md)"
)
_UTF8 = 0x800  # flag of a zip member whose name says that it is UTF-8
_DAMAGED: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, NotImplementedError)
with contextlib.suppress(ImportError):  # some Pythons are built without it
    from lzma import LZMAError

    _DAMAGED += (LZMAError,)


@dataclass(frozen=True)
class _Member:
    """An image file not yet arranged by the layout; ``parts`` from the layout's root."""

    name: str
    parts: tuple[str, ...]
    size: int
    stamp: int


def is_there(path: Path) -> bool:
    """Return True if a path, or a pattern of shards, names a file or folder that exists.

    Raises:
        DataError: the pattern names too many.
    """
    return path.exists() or any(shard.is_file() for shard in expanded(path))


def open_source(path: Path, watch: Callable[[], None] = lambda: None) -> ImageSource:
    """Open images in any of the forms of docs/data.md.

    Args:
        path: of the images.
        watch: called for each name that a listing meets in folders; what it raises ends it.

    Raises:
        DataError: there are none at ``path``; the message names the expected layout.
    """
    if path.is_dir():
        if cifar := cifar_in(path):
            return CifarSource(path, cifar)
        return ShardSource(path) if shards_in(path) else FolderSource(path, watch)
    if path.is_file():
        of_suffix = {".csv": ListSource, ".jsonl": JsonListSource, ".tar": ShardSource}
        return of_suffix.get(path.suffix.lower(), ZipSource)(path)
    if is_there(path):
        return ShardSource(path)
    raise DataError(f"there is no folder or file {path}.", action=LAYOUT)


class _Files(ImageSource):
    """A source with one of this module's layouts."""

    def listing(self) -> Listing:
        """List the source as it is now."""
        faults: list[str] = []
        members = [m for m in self._members(faults) if _wanted(m, faults)]
        listing = _arrange(self._rooted(members, faults), faults)
        if not listing.entries:
            loose = sum(len(m.parts) == 1 for m in members)
            found = f"{loose} images in no class folder" if loose else "no images"
            # Of loose images, the other faults are no cause.
            causes = [f for f in listing.faults if not loose or _LABELS_ELSEWHERE in f]
            why = f" ({causes[0]})" if causes else ""
            raise DataError(f"{self.path} holds {found}{why}.", action=LAYOUT)
        return listing

    @abstractmethod
    def _members(self, faults: list[str]) -> Iterator[_Member]:
        """Yield all files; add a sentence for each thing that cannot be used."""

    @abstractmethod
    def _rooted(self, members: list[_Member], faults: list[str]) -> list[_Member]:
        """Return the files by their paths from the layout's root."""


class FolderSource(_Files):
    """Class folders on disk; links are followed, to each folder once in a class."""

    form = "folder"
    _has_classes = True

    def __init__(self, path: Path, watch: Callable[[], None] = lambda: None) -> None:
        super().__init__(path)
        self._watch = watch

    def read(self, entry: ImageEntry) -> bytes:
        """Return a file's bytes."""
        return read_file(self.path / entry.name, entry.name)

    def unchanged(self, entry: ImageEntry) -> bool:
        """Compare size and modification time."""
        return same_file(self.path / entry.name, entry.size, entry.stamp)

    def _members(self, faults: list[str]) -> Iterator[_Member]:
        walk, others, lists = FolderWalk(self.path, self._watch), OtherFormats(), LeftOut()
        for parts, files in walk:
            for file in files:
                others.see((*parts, file))
                if self._has_classes and is_hub_list(self.path.joinpath(*parts, file)):
                    lists.add(f"list {'/'.join((*parts, file))!r}", _LABELS_ELSEWHERE)
                yield from self._member((*parts, file), faults)
        faults.extend(lists.sentences())
        faults.extend(others.sentences())
        faults.extend(walk.sentences())

    def _member(self, parts: tuple[str, ...], faults: list[str]) -> Iterator[_Member]:
        if not is_image(parts[-1]):
            return
        try:
            status = self.path.joinpath(*parts).stat()
        except OSError as error:
            faults.append(f"image {'/'.join(parts)!r} cannot be read ({error.strerror})")
            return
        if stat.S_ISREG(status.st_mode):
            yield _Member("/".join(parts), parts, status.st_size, status.st_mtime_ns)

    def _rooted(self, members: list[_Member], faults: list[str]) -> list[_Member]:
        # Not skipped as in a zip: a folder grows, and its first class may have folders.
        if top := _wrapper(members):
            faults.append(
                f"folder {top[:200]!r}, the only one, is taken as a class: if the classes are "
                f"folders in it, name {str(self.path / top)!r} instead"
            )
        return members


class LooseSource(FolderSource):
    """All images below a folder, under any names of folders; their class name is empty."""

    _has_classes = False

    def listing(self) -> Listing:
        """List the folder as it is now; it may be empty.

        Raises:
            DataError: the folder is gone.
        """
        if not self.path.is_dir():
            raise DataError(f"there is no folder {self.path}.", action="Restore it.")
        faults: list[str] = []
        members = sorted(self._members(faults), key=lambda m: m.parts)
        wanted = [m for m in members if _wanted(m, faults)]
        entries = (ImageEntry(m.name, "", None, m.size, m.stamp) for m in wanted)
        return Listing(tuple(entries), tuple(faults))


class ZipSource(_Files):
    """A zip file, read in place; a single outermost folder is skipped."""

    form = "zip file"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise DataError(
                f"{path} is not a readable zip file ({error}).", action=_instead(path)
            ) from error
        # zipfile fails on a member without a name, so it is left out.
        named = (i for i in self._zip.infolist() if i.filename)
        self._infos = {_name_of(i): i for i in named if not i.is_dir()}

    def read(self, entry: ImageEntry) -> bytes:
        """Return a member's bytes; never more than it declares, and checked by its CRC."""
        try:
            with self._zip.open(self._infos[entry.name]) as file:
                return read_bounded(file, entry.name)
        except (OSError, KeyError, EOFError, ValueError, RuntimeError) as error:
            raise unreadable(entry.name, error) from error
        except _DAMAGED as error:
            raise unreadable(entry.name, error) from error

    def unchanged(self, entry: ImageEntry) -> bool:
        """Compare size and CRC-32 of the archive's directory, as read when it was opened."""
        info = self._infos.get(entry.name)
        return info is not None and (info.file_size, info.CRC) == (entry.size, entry.stamp)

    def close(self) -> None:
        """Close the zip file."""
        self._zip.close()

    def _members(self, faults: list[str]) -> Iterator[_Member]:
        others = OtherFormats()
        for name, info in self._infos.items():
            others.see(PurePosixPath(name).parts)
            if not is_image(name):
                continue
            if _escapes(name):
                faults.append(f"zip member {name[:120]!r} points outside the archive")
            elif info.flag_bits & 0x1:
                faults.append(f"zip member {name[:120]!r} is encrypted")
            else:
                yield _Member(name, PurePosixPath(name).parts, info.file_size, info.CRC)
        faults.extend(others.sentences())

    def _rooted(self, members: list[_Member], faults: list[str]) -> list[_Member]:
        del faults
        return [replace(m, parts=m.parts[1:]) for m in members] if _wrapper(members) else members


def _instead(path: Path) -> str:
    """Return the advice for a file that is no zip."""
    if unpack := _UNPACKERS.get(path.suffix.lower()):
        return f"Compressed files cannot be read in place: unpack it ({unpack} {path.name})."
    if is_image(path.name):
        return f"It is one image: give the folder of its class folders. {LAYOUT}"
    return LAYOUT


def _name_of(info: zipfile.ZipInfo) -> str:
    """Return a member's name: Linux's `zip` writes UTF-8 and does not say so."""
    if info.flag_bits & _UTF8:
        return info.filename
    try:
        return info.filename.encode("cp437").decode()
    except UnicodeError:
        return info.filename


def _escapes(name: str) -> bool:
    first, *_ = parts = name.split("/")
    return not first or ":" in first or "\\" in name or ".." in parts


def _wanted(member: _Member, faults: list[str]) -> bool:
    if hidden(member.parts):
        return False
    if too_large := oversize(member.name, member.size):
        faults.append(too_large)
    return not too_large


def _arrange(members: Iterable[_Member], faults: list[str]) -> Listing:
    """Determine the class and the part of every file."""
    ordered = sorted(members, key=lambda m: m.parts)
    by_top: dict[str, list[_Member]] = {}
    loose = [m for m in ordered if len(m.parts) == 1]
    for member in ordered:
        if len(member.parts) > 1:
            by_top.setdefault(member.parts[0], []).append(member)
    if loose and by_top:
        faults.append(f"{len(loose)} images are in no class folder, such as {loose[0].name!r}")
    # A class may itself be called "train": then images lie directly in its folder. Without other
    # classes beside it, or with both sides, a few images astray do not make it one.
    both = {"train", "test"}
    few_astray = by_top.keys() <= both or both <= by_top.keys()
    sides: list[SourcePart] = [
        side
        for side in ("train", "test")
        if side in by_top and _holds_folders(by_top[side], few_astray=few_astray)
    ]
    names = ClassNames("give both one name")
    entries: list[ImageEntry] = []
    if not sides:
        faults.extend(
            f"folder {top!r} is taken as a class: only folders called train and test whose images "
            "lie in class folders are sides"
            for top, inside in by_top.items()
            if top.lower() in both and any(len(m.parts) > 2 for m in inside)
        )
        for top, inside in by_top.items():
            entries.extend(_class_entries(names, top, inside, None, faults))
        return Listing(tuple(entries), tuple(faults))
    faults.extend(
        f"folder {top!r} next to {' and '.join(f'{s}/' for s in sides)} is left out"
        for top in by_top
        if top not in sides
    )
    for side in sides:
        by_class: dict[str, list[_Member]] = {}
        astray = [m for m in by_top[side] if len(m.parts) == 2]
        if astray:
            where = f"directly in {side}/, in no class folder"
            faults.append(f"{len(astray)} images lie {where}, such as {astray[0].name!r}")
        for member in by_top[side]:
            if len(member.parts) > 2:
                by_class.setdefault(member.parts[1], []).append(member)
        for folder, inside in by_class.items():
            entries.extend(_class_entries(names, folder, inside, side, faults))
    return Listing(tuple(entries), tuple(faults))


def _holds_folders(members: list[_Member], *, few_astray: bool = False) -> bool:
    """Return True if a folder's images lie in folders of its own, all or (few astray) most."""
    deep = sum(len(m.parts) > 2 for m in members)
    return deep == len(members) or (few_astray and 2 * deep > len(members))


def _wrapper(members: list[_Member]) -> str:
    """Return the only outermost folder if its images lie in folders of its own; else ""."""
    tops = {m.parts[0] for m in members}
    if len(tops) != 1 or tops & {"train", "test"} or not _holds_folders(members, few_astray=True):
        return ""
    return tops.pop()


def _class_entries(
    names: ClassNames,
    folder: str,
    members: list[_Member],
    part: SourcePart | None,
    faults: list[str],
) -> Iterator[ImageEntry]:
    class_name, fault = names.of(folder)
    if fault:
        place = f"{part}/{folder[:200]}" if part else folder[:200]
        faults.append(f"folder {place!r} is left out: {fault}")
        return
    for m in members:
        yield ImageEntry(m.name, class_name, part, m.size, m.stamp)
