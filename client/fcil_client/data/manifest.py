"""The client's record of its images: the readable ones, by digest, class and side."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fcil_adapters.images.decoding import ImageEntry, ImageSource, decode, digest
from fcil_adapters.resources import machine
from fcil_client.data.split import SIDES, Fractions, Side, split
from fcil_protocol.errors import CorruptFile, DataError, StorageError
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

FORMAT = 1
NAME = "manifest.json"  # in the client's directory
DAMAGED = ".damaged"  # suffix of a file that could not be read


@dataclass(frozen=True)
class Image:
    """A readable image with its content's digest (hex) and its side."""

    entry: ImageEntry
    digest: str
    side: Side


@dataclass(frozen=True)
class ImageManifest:
    """All usable images of a source, by name.

    Attributes:
        faults: one sentence per file or folder that cannot be used.
        notes: one sentence per rule of the split that the user should know of.
        ever: digests (hex) of all images that this or an earlier scan found.
    """

    images: tuple[Image, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ever: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over class, content and side of all images, independent of their names."""
        rows = sorted([i.entry.class_name, i.digest, i.side] for i in self.images)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def counts(self, part: Side) -> dict[str, int]:
        """Return the number of images of each class on one side, without empty classes."""
        found = Counter(i.entry.class_name for i in self.images if i.side == part)
        return dict(sorted(found.items()))


@dataclass
class _ManifestFile:
    """Content of the manifest's file: each file's result, and all sides ever given."""

    salt: str
    files: dict[str, list[Any]] = field(default_factory=dict)  # name -> row of `_row`
    sides: dict[str, Side] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scan(
    source: ImageSource,
    cache: Path | None,
    salt: bytes,
    fractions: Fractions = Fractions(),  # noqa: B008  a NamedTuple of numbers
    *,
    threads: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    keep: bool = True,
    before: ImageManifest | None = None,
) -> ImageManifest:
    """Find all images, decode each new one once to check that it is readable, and split them.

    Files that cannot be read are faults of the manifest, not errors.

    Args:
        source: source of the images.
        cache: JSON file (0600) with the results of earlier scans; it also keeps the sides that the
            hash alone does not give, so it should live as long as the salt. A damaged one is set
            aside and rebuilt, with a note.
        salt: this client's, drawn once.
        fractions: expected shares of train, select and test.
        threads: threads that decode; 0: one per core, at most 8.
        on_progress: called with files done and files in total.
        keep: write the cache. If the disk is full, the images count all the same, with a note, and
            the next scan reads them again.
        before: result of this process's last scan, which may not be in the cache: its images keep
            their sides.

    Raises:
        DataError: the source cannot be used at all.
        CorruptFile: the cache is of another salt, or of a newer fcil.
        StorageError: the cache cannot be read.
    """
    listing = source.listing()
    old, damage = _load(cache, salt)
    files = _examine(source, listing.entries, old, threads, on_progress)
    readable = [(e, str(files[e.name][4])) for e in listing.entries if files[e.name][4]]
    broken = [str(files[e.name][5]) for e in listing.entries if not files[e.name][4]]
    if not readable:
        raise DataError(
            f"none of the {len(broken)} images in {source.path} can be used: {broken[0]}",
            action="Replace them.",
        )
    unsaved = {} if before is None else {i.digest: i.side for i in before.images}
    result = split(readable, {**unsaved, **old.sides}, salt, fractions)
    record = _ManifestFile(_salt_mark(salt), files, result.sides, [*listing.faults, *broken])
    record.notes = result.notes
    for name in result.left_out:
        files[name][6] = False
    notes = [damage] if damage else []
    if cache is not None and keep and record != old:
        notes += _keep(cache, record, damaged=bool(damage))
    manifest = _manifest(record)
    return replace(manifest, notes=(*manifest.notes, *notes))


def _keep(cache: Path, record: _ManifestFile, *, damaged: bool) -> list[str]:
    """Write the manifest's file; return a sentence if that is not possible now."""
    try:
        if damaged:
            _set_aside(cache)
        write_atomic(cache, json.dumps(vars(record) | {"format": FORMAT}).encode())
    except StorageError as error:
        # The next scan of this process keeps the sides all the same (`before`).
        return [f"the manifest of the images could not be saved: {error}"]
    return []


def load(cache: Path, salt: bytes) -> ImageManifest | None:
    """Return the manifest of the last scan without reading the images.

    None before the first scan, and if it is damaged: the next scan rebuilds it.

    Raises:
        CorruptFile: it is of another salt, or of a newer fcil.
    """
    record, _ = _load(cache, salt)
    return _manifest(record) if record.files else None


def diff(old: ImageManifest, new: ImageManifest) -> list[str]:
    """Return one sentence per class with images added or removed between two scans."""
    before, after = _contents(old), _contents(new)
    sentences = []
    for name in sorted(before.keys() | after.keys()):
        here, there = before.get(name, Counter()), after.get(name, Counter())
        came, went = (there - here).total(), (here - there).total()
        if not here:
            sentences.append(f"new class {name!r}: {_images(came)}")
        elif not there:
            sentences.append(
                f"class {name!r} is gone ({_images(went)}): what was learned of it stays in the "
                "global model"
            )
        elif came or went:
            parts = [f"{_images(came)} more"] * bool(came) + [f"{_images(went)} fewer"] * bool(went)
            sentences.append(f"class {name!r}: {', '.join(parts)}")
    return sentences


def renames(old: ImageManifest, new: ImageManifest) -> list[str]:
    """Return one sentence per class whose images are now in a class of another, new name."""
    before, after = _contents(old), _contents(new)
    known = {class_key(name) for name in before}
    places: dict[str, list[str]] = {}  # digest -> new classes with such an image
    for name, contents in sorted(after.items()):
        for content in contents if class_key(name) not in known else ():
            places.setdefault(content, []).append(name)
    sentences = []
    for name in sorted(before.keys() - after.keys()):
        found = Counter(other for content in before[name] for other in places.get(content, ()))
        for other, same in found.most_common(1):
            if 2 * same > len(before[name]):
                sentences.append(
                    f"the images of class {name!r} are in class {other!r} now: to the federation "
                    "another class, unless it knows that name. If both are one, go back to the old "
                    "name, or ask the operator for: fcil-server classes alias "
                    f"{shlex.join([other, name])}"
                )
    return sentences


def _contents(manifest: ImageManifest) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for image in manifest.images:
        found.setdefault(image.entry.class_name, Counter())[image.digest] += 1
    return found


def _images(n: int) -> str:
    return f"{n} image{'' if n == 1 else 's'}"


def _examine(
    source: ImageSource,
    entries: tuple[ImageEntry, ...],
    old: _ManifestFile,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, list[Any]]:
    """Return a row per entry; unchanged good files are taken from the cache."""
    rows: dict[str, list[Any]] = {}
    kept: dict[PurePosixPath, list[ImageEntry]] = {}
    for entry in entries:
        known = old.files.get(entry.name)
        if known is not None and known[4] and known[2:4] == [entry.size, entry.stamp]:
            kept.setdefault(PurePosixPath(entry.name).parent, []).append(entry)
    for inside in kept.values():
        if _is_as_known(source, inside[0], old.files[inside[0].name][4]):
            rows |= {entry.name: _row(entry, old.files[entry.name][4], "") for entry in inside}
    fresh = [e for e in entries if e.name not in rows]
    done = len(rows)
    with ThreadPoolExecutor(threads or min(8, machine.cores())) as pool:
        for entry, (content, fault) in zip(fresh, pool.map(examine(source), fresh), strict=True):
            rows[entry.name] = _row(entry, content, fault)
            done += 1
            on_progress(done, len(entries))
    return rows


def _is_as_known(source: ImageSource, entry: ImageEntry, content: str) -> bool:
    """Return True unless an image has another content than a file of its size and time had.

    Of each folder one is read: folders that swap their names keep the sizes and times of all files.
    """
    try:
        return digest(source.read(entry)).hex() == content
    except DataError:  # a disk that fails for a moment; what is gone is not listed
        return True


def examine(
    source: ImageSource, known: frozenset[str] = frozenset()
) -> Callable[[ImageEntry], tuple[str, str]]:
    """Return a function from an entry to its digest (hex), or to why it cannot be used.

    Images with a ``known`` digest are not decoded.
    """

    def look(entry: ImageEntry) -> tuple[str, str]:
        try:
            data = source.read(entry)
        except DataError as error:
            return "", error.message
        content = digest(data).hex()
        try:
            if content not in known:
                decode(data)
        except DataError as error:
            return "", f"image {entry.name!r}: {error.message}"
        except MemoryError:
            return "", f"image {entry.name!r} does not fit into memory."
        return content, ""

    return look


def _row(entry: ImageEntry, content: str, fault: str) -> list[Any]:
    # class, layout part, size, stamp, digest or "", fault or "", used
    return [entry.class_name, entry.part, entry.size, entry.stamp, content, fault, True]


def _manifest(record: _ManifestFile) -> ImageManifest:
    images = [
        Image(ImageEntry(name, row[0], row[1], row[2], row[3]), row[4], record.sides[row[4]])
        for name, row in record.files.items()
        if row[4] and row[6]
    ]
    # Training visits images in this order: by path, independent of the order of listing.
    images.sort(key=lambda image: image.entry.name)
    ever = frozenset(record.sides)
    return ImageManifest(tuple(images), tuple(record.faults), tuple(record.notes), ever)


def _salt_mark(salt: bytes) -> str:
    return hashlib.sha256(b"fcil/1/salt\0" + salt).hexdigest()[:16]


def _load(cache: Path | None, salt: bytes) -> tuple[_ManifestFile, str]:
    """Return the record, and one sentence if it is lost because the file is damaged."""
    fresh = _ManifestFile(_salt_mark(salt))
    if cache is None:
        return fresh, ""
    with storage_errors("read the manifest", cache):
        text = cache.read_bytes() if cache.exists() else None
    if text is None:
        return fresh, ""
    try:
        record = _parse(text)
    except _NewerFormat as error:
        raise CorruptFile(
            f"the manifest {cache} has format {error}; this fcil reads {FORMAT}.",
            action="Use the fcil that wrote it, or a newer one.",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # The salt's own check has passed: the hash decides as before.
        return fresh, (
            f"the manifest {cache} was damaged and is rebuilt; the damaged file is kept as "
            f"{cache.name}{DAMAGED}. The split follows from the images and the salt, as before; "
            "only images of very small classes, and those that were moved into or out of a test/ "
            "folder after an earlier scan, can have changed sides"
        )
    if record.salt != fresh.salt:
        raise CorruptFile(
            f"the salt in {cache.parent} is not the one that {cache} was made with: expected "
            f"one with the mark {record.salt}, got {fresh.salt}.",
            action="Restore the file `salt` from a backup. Without one, remove "
            f"{cache.name}: the images are split again, and images that were kept for tests are "
            "then used for training.",
        )
    return record, ""


def _set_aside(cache: Path) -> None:
    with storage_errors("read the manifest", cache):
        data = cache.read_bytes()
    write_atomic(cache.with_name(cache.name + DAMAGED), data)


class _NewerFormat(Exception):
    """The file is intact as far as this fcil can tell, but of a newer format."""


def _parse(text: bytes) -> _ManifestFile:
    fields = json.loads(text)
    number = fields.pop("format")
    if isinstance(number, int) and number > FORMAT:
        raise _NewerFormat(number)
    if number != FORMAT:
        raise ValueError("format")
    record = _ManifestFile(**fields)
    for name, row in record.files.items():
        cls, part, size, stamp, content, fault, used = row
        kinds = (cls, str), (size, int), (stamp, int), (content, str), (fault, str), (used, bool)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(name)
        if part not in (None, *SIDES) or (content and content not in record.sides):
            raise ValueError(name)
    if not set(record.sides.values()) <= set(SIDES):
        raise ValueError("sides")
    _all_text([record.salt, *record.faults, *record.notes, *record.sides])
    return record


def _all_text(values: Iterable[object]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("text")
