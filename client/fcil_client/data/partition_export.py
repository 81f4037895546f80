"""A partition as real folders, one for each client, for transport to devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from fcil_adapters.images.decoding import ImageEntry, ImageSource
from fcil_adapters.images.image_source import is_image, suffix_of
from fcil_client.data.partition_source import SharedData
from fcil_protocol.errors import UsageError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic


def check_target(folder: Path, data: Path) -> None:
    """Check that the target holds no files that could be mixed with the export.

    Raises:
        UsageError: the folder is not empty, or is inside the data, which would change.
    """
    if folder.resolve().is_relative_to(data.resolve()):
        raise UsageError(
            f"{folder} is inside the data that is to be divided.",
            action="Give the folders another place: --export DIR",
        )
    with storage_errors("look into", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} already exists and is not empty.",
                action="Give the folders another place: --export DIR",
            )


def export(parts: SharedData, folder: Path, progress: Callable[[int, int], None]) -> list[Path]:
    """Write ``client-000/train/<class>/...`` and ``test/`` for every slot.

    Files of a folder become hard links if the disk allows it, which take no space; else they are
    copied. Images for tuning are in ``train/``: a client draws its own share of it.

    Args:
        parts: the data set and its partition.
        folder: new or empty.
        progress: receives the number of clients done and in total.

    Raises:
        UsageError: as in `check_target`.
        DataError: an image can no longer be read.
        StorageError: a file cannot be written.
    """
    check_target(folder, parts.source.path)
    clients = parts.partition.clients
    width = max(3, len(str(clients - 1)))
    made = []
    for slot in range(clients):
        made.append(folder / f"client-{slot:0{width}d}")
        _client(parts.source, parts.entries(slot), made[-1])
        progress(slot + 1, clients)
    return made


def _client(source: ImageSource, entries: tuple[ImageEntry, ...], folder: Path) -> None:
    with storage_errors("create", folder):
        folder.mkdir(parents=True)
    taken: set[Path] = set()
    for entry in entries:
        side = "test" if entry.part == "test" else "train"
        target = folder / side / entry.class_name / PurePosixPath(entry.name).name
        if not is_image(target.name):
            target = target.with_name(target.name + suffix_of(target.name))
        number = 1
        while target in taken:  # files of one name from subfolders of their class
            target = target.with_stem(f"{PurePosixPath(entry.name).stem}-{number}")
            number += 1
        taken.add(target)
        with storage_errors("create", target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        if not _linked(source.path / entry.name, target):
            write_atomic(target, source.read(entry), mode=0o644, sync=False)


def _linked(origin: Path, target: Path) -> bool:
    try:
        os.link(origin.resolve(), target)
    except OSError:  # a zip file, another disk, or a file system without links
        return False
    return True
