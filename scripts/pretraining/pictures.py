"""The pictures of a pre-training: classes of a folder or zip."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import decode, preprocess
from fcil_adapters.images.image_source import ImageEntry, ImageSource, SourcePart
from fcil_adapters.images.sources import open_source
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.schema import class_key

# CIFAR-100 is what the embedded backbone is tested on: no class of it may have trained it.
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = frozenset(class_key(name) for name in _CIFAR100.split())
_HALF = (0.5, 0.5, 0.5)  # what preprocessing to uint8 does not look at


@dataclass(frozen=True)
class Pictures:
    """Labelled pictures.

    Attributes:
        images: (N, S, S, 3) uint8, by class and name; in memory, or mapped from a file.
        labels: (N,) int64, places in `classes`.
        digest: SHA-256 over the names, pixels and targets, which a checkpoint is bound to; with
            held pictures over that and theirs.
        targets: (N, 1 or 2, D) float16, a teacher's features of each picture and perhaps of the
            mirrored one, mapped from a file; None: there is no teacher.
        teacher: its name, image size and digest, for people.
        held: (M, S, S, 3) uint8, pictures whose features are to stay (`Recipe.hold`); None: none.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    digest: str
    targets: NDArray[np.float16] | None = None
    teacher: str = ""
    held: NDArray[np.uint8] | None = None

    def part(self, first: int, count: int) -> Pictures:
        """Return ``count`` pictures of each class from the ``first`` on."""
        places = [np.flatnonzero(self.labels == c) for c in range(len(self.classes))]
        rows = np.concatenate([p[first : first + count] for p in places])
        return Pictures(self.images[rows], self.labels[rows], self.classes, self.digest)

    def holding(self, held: Pictures) -> Pictures:
        """Return the same with pictures whose features are to stay; the digest is of both."""
        both = hashlib.sha256(f"{self.digest} {held.digest}".encode()).hexdigest()
        return replace(self, held=held.images, digest=both)


def read_pictures(
    path: Path, size: int | Preprocessing, part: SourcePart, most: int | None = None
) -> Pictures:
    """Read one part of a folder or a zip file of class folders.

    Args:
        path: holds ``<class>/*``, or ``train/<class>/*`` and ``test/<class>/*``.
        size: side of the square that each picture becomes, or a backbone's preprocessing.
        part: which of the two; without them all pictures are ``train``.
        most: of each class the first so many, by name.

    Raises:
        DataError: there is no such file, or not two classes of pictures, or one is damaged.
    """
    prepared = plain(size) if isinstance(size, int) else size
    source = open_source(path)
    try:
        by_class: dict[str, list[NDArray[np.uint8]]] = {}
        names = hashlib.sha256()
        for entry in entries_of(source, part):
            some = by_class.setdefault(entry.class_name, [])
            if most is not None and len(some) == most:
                continue
            square = square_of(source, entry, source.read(entry), prepared)
            some.append(square)
            names.update(entry.name.encode() + b"\0" + square.tobytes())
    finally:
        source.close()
    if len(by_class) < 2:
        raise DataError(
            f"pictures of at least two classes are needed for {part}ing, {path} has "
            f"{len(by_class)}.",
            action="Give a folder or zip of train/<class>/*.",
        )
    classes = tuple(sorted(by_class))
    counts = [len(by_class[c]) for c in classes]
    images = np.stack([square for c in classes for square in by_class[c]])
    labels = np.repeat(np.arange(len(classes)), counts)
    return Pictures(images, labels, classes, names.hexdigest())


def plain(size: int) -> Preprocessing:
    """Return the steps to a square of a side."""
    return Preprocessing(size, _HALF, _HALF)


def entries_of(source: ImageSource, part: SourcePart) -> list[ImageEntry]:
    """Return one part of a source by class and name; without parts all are ``train``."""
    chosen = [e for e in source.entries() if (e.part or "train") == part]
    return sorted(chosen, key=lambda e: (e.class_name, e.name))


def square_of(
    source: ImageSource, entry: ImageEntry, data: bytes, prepared: Preprocessing
) -> NDArray[np.uint8]:
    """Decode a picture's bytes: (S, S, 3).

    Raises:
        DataError: they are damaged; the message names the picture.
    """
    try:
        return preprocess(decode(data), prepared)
    except DataError as error:
        raise DataError(
            f"{source.path}, picture {entry.name!r}: {error.message}", action=error.action
        ) from error


def check_disjoint(classes: tuple[str, ...], *, allowed: bool) -> None:
    """Refuse classes of CIFAR-100, on which the backbone is tested.

    Raises:
        DataError: there are some and it was not said that they may be.
    """
    shared = sorted(c for c in classes if class_key(c) in CIFAR100)
    if shared and not allowed:
        raise DataError(
            f"{len(shared)} of the {len(classes)} classes are also classes of CIFAR-100, such as "
            f"{', '.join(shared[:3])}; tests on CIFAR-100 would then say nothing.",
            action="Leave these classes out, or say --allow-overlap if CIFAR-100 is not your test.",
        )
