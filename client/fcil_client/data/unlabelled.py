"""Unlabelled images: a folder of the owner's that is offered besides the class folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcil_adapters.images.decoding import ImageEntry
from fcil_adapters.images.sources import LooseSource
from fcil_adapters.resources import machine
from fcil_client.data.manifest import examine
from fcil_protocol.errors import DataError, UsageError

READ = 10  # files read for each image that a round may use: most can be counted already


@dataclass(frozen=True)
class UnlabelledImage:
    """A readable image with its content's digest (hex)."""

    entry: ImageEntry
    digest: str


@dataclass(frozen=True)
class ChosenImages:
    """Images for one round, and one sentence per file that cannot be used."""

    images: tuple[UnlabelledImage, ...]
    faults: tuple[str, ...]


def choose(
    source: LooseSource,
    most: int,
    used: frozenset[str],
    rng: np.random.Generator,
    alive: Callable[[], None],
    threads: int = 0,
) -> ChosenImages:
    """Draw images at random, but none whose content was used already.

    Args:
        source: the folder.
        most: the largest number of images; at most `READ` times as many files are read.
        used: digests (hex) of images in class folders, and of those counted before.
        rng: draws them.
        alive: called for every image that is read.
        threads: threads that decode; 0: one per core, at most 8.

    Raises:
        DataError: the folder cannot be read, or has no further image.
    """
    alive()
    listing = source.listing()
    found: dict[str, UnlabelledImage] = {}
    faults = list(listing.faults)
    drawn = rng.permutation(len(listing.entries))[: READ * most]
    order = [listing.entries[i] for i in drawn]
    for entry, digest, fault in _examined(source, order, used, threads):
        alive()
        if fault:
            faults.append(fault)
        elif digest not in used:
            found.setdefault(digest, UnlabelledImage(entry, digest))
        if len(found) == most:
            break
    if not found:
        raise DataError(
            f"all {len(order)} images that were read in {source.path} are counted already, are in "
            f"a class folder too, or are broken{f' ({faults[0]})' if faults else ''}.",
            action="Add new ones; the next task's round finds them.",
        )
    return ChosenImages(tuple(found.values()), tuple(faults))


def _examined(
    source: LooseSource, entries: list[ImageEntry], used: frozenset[str], threads: int
) -> Iterator[tuple[ImageEntry, str, str]]:
    """Yield each entry with its digest, or a sentence that says why it cannot be used."""
    look, workers = examine(source, used), threads or min(8, machine.cores())
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(entries), 4 * workers):
            some = entries[start : start + 4 * workers]
            for entry, (digest, fault) in zip(some, pool.map(look, some), strict=True):
                yield entry, digest, fault


def check_folder(folder: Path, data: Path, *, divided: bool) -> Path:
    """Return the folder's absolute path.

    Args:
        folder: of unlabelled images.
        data: the labelled ones.
        divided: a partition divides ``data`` between several clients.

    Raises:
        UsageError: it is no folder, overlaps with the labelled images, or would be counted by every
            client of a partition.
    """
    if divided:
        raise UsageError(
            "--unlabelled is for a client with a folder of its own: each client of a partition "
            "would count the same images.",
            action="Leave out --unlabelled or --partition.",
        )
    if not folder.is_dir():
        raise UsageError(
            f"--unlabelled: there is no folder {folder}.",
            action="Name a folder of images; they may lie in folders of any names.",
        )
    mine, labelled = folder.resolve(), data.resolve()
    inside = mine.is_relative_to(labelled) or labelled.is_relative_to(mine)
    if labelled.is_dir() and inside:
        raise UsageError(
            f"--unlabelled {folder} and --data {data} overlap: folders in --data are classes.",
            action="Keep unlabelled images in a folder beside it.",
        )
    return mine
