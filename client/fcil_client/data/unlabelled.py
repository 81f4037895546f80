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

CHARGED_AS = "unlabelled/"  # their key in the privacy ledger; no class has a name with a slash


@dataclass(frozen=True)
class UnlabelledImage:
    """A readable image with its content's digest (hex)."""

    entry: ImageEntry
    digest: str


@dataclass(frozen=True)
class Offer:
    """Images that a round may use, and one sentence per file that cannot be used."""

    images: tuple[UnlabelledImage, ...]
    faults: tuple[str, ...]


def choose(
    source: LooseSource,
    most: int,
    used: frozenset[str],
    rng: np.random.Generator,
    alive: Callable[[], None],
    threads: int = 0,
) -> Offer:
    """Draw images at random, but none whose content was used already.

    Args:
        source: the folder.
        most: the largest number of images.
        used: digests (hex) of images in class folders, and of those counted before.
        rng: draws them.
        alive: called for every image that is read.
        threads: threads that decode; 0: one per core, at most 8.

    Raises:
        DataError: the folder cannot be read, or has no further image.
    """
    listing = source.listing()
    found: dict[str, UnlabelledImage] = {}
    faults = list(listing.faults)
    order = [listing.entries[i] for i in rng.permutation(len(listing.entries))]
    for entry, digest, fault in _examined(source, order, threads):
        alive()
        if fault:
            faults.append(fault)
        elif digest not in used:
            found.setdefault(digest, UnlabelledImage(entry, digest))
        if len(found) == most:
            break
    if not found:
        raise DataError(
            f"all {len(order)} images in {source.path} are counted already, are in a class folder "
            "too, or cannot be read.",
            action="Add new ones; the next task's round finds them.",
        )
    return Offer(tuple(found.values()), tuple(faults))


def _examined(
    source: LooseSource, entries: list[ImageEntry], threads: int
) -> Iterator[tuple[ImageEntry, str, str]]:
    """Yield each entry with its digest, or a sentence that says why it cannot be used."""
    look, workers = examine(source), threads or min(8, machine.cores())
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(entries), 4 * workers):
            some = entries[start : start + 4 * workers]
            for entry, (digest, fault) in zip(some, pool.map(look, some), strict=True):
                yield entry, digest, fault


def check_folder(folder: Path, data: Path) -> Path:
    """Return the folder's absolute path.

    Raises:
        UsageError: it is no folder, or overlaps with the labelled images.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--unlabelled: there is no folder {folder}.",
            action="Name a folder of images; they may lie in folders of any names.",
        )
    mine, labelled = folder.resolve(), data.resolve()
    if mine.is_relative_to(labelled) or labelled.is_relative_to(mine):
        raise UsageError(
            f"--unlabelled {folder} and --data {data} overlap: folders in --data are classes.",
            action="Keep unlabelled images in a folder beside it.",
        )
    return mine
