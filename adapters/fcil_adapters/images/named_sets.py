"""Data sets by name: each has a folder on this machine, and its name means that folder.

``cifar10`` and ``cifar100`` are their binary versions, ``hf:OWNER/NAME@REVISION`` is a data set of
Hugging Face as shards. A program that learns never downloads: `fetch` does, when it is asked to.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import ssl
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

import platformdirs

from fcil_adapters.images.cifar_source import CIFAR_10, CIFAR_100, CifarFiles
from fcil_adapters.images.hub_set import HubSet
from fcil_adapters.images.image_source import LAYOUT
from fcil_adapters.images.sources import is_there
from fcil_protocol.errors import DataError
from fcil_protocol.storage.atomic_files import scratch, storage_errors, sync_data

VARIABLE = "FCIL_DATASETS"  # of the environment: the folder of all sets
COMMAND = "fcil-client data"
TIMEOUT_S = 60.0
_PIECE = 1 << 20  # bytes
_HUB = re.compile(r"hf:([\w.-]+)/([\w.-]+)(?:/([\w.-]+))?@([\w./-]+)", re.ASCII)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Archive:
    """The one file that a set is published as."""

    url: str
    size: int  # bytes
    sha256: str
    files: CifarFiles

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
ARCHIVES = {
    "cifar10": Archive(
        _CIFAR + "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        CIFAR_10,
    ),
    "cifar100": Archive(
        _CIFAR + "cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        CIFAR_100,
    ),
}


def sets_folder() -> Path:
    """Return the folder of all sets: ``FCIL_DATASETS``, or one of the user's cache."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else platformdirs.user_cache_path("fcil", appauthor=False) / "data"


def located(data: Path) -> Path:
    """Return the path that ``--data`` means: the folder of a named set, or the path itself.

    A file or folder of the same name comes first.

    Raises:
        DataError: it begins as a name of Hugging Face and is none.
    """
    if data.exists() or not is_name(str(data)):
        return data
    return sets_folder() / (str(data) if str(data) in ARCHIVES else _hub(str(data)).folder)


def is_name(text: str) -> bool:
    """Return True if a text is meant as the name of a set."""
    return text in ARCHIVES or text.startswith("hf:")


def find(data: Path) -> Path:
    """Return the path of images that exist.

    Raises:
        DataError: there are none; of a named set, the message says how to get it.
    """
    path = located(data)
    if is_there(path):
        return path
    if path == data:
        raise DataError(f"there is no folder or file {data}.", action=LAYOUT)
    raise DataError(
        f"the data set {data} is not on this machine: there is no folder {path}.",
        action=f"Download it: {COMMAND} {data} --download. {_by_hand(str(data), path)}",
    )


def fetch(name: str, *, download: bool, progress: Progress = lambda _done, _total: None) -> Path:
    """Return the folder of a named set, made from its archive or, if allowed, from its publisher.

    Args:
        name: as in ``--data``.
        download: ask the publisher for a set that is not here.
        progress: called with bytes or images done, and in all.

    Raises:
        DataError: it is not here, cannot be fetched, or is not what was published.
        StorageError: it cannot be written.
    """
    path = located(Path(name))
    if is_there(path) or not is_name(name):
        return find(Path(name))
    archive = ARCHIVES.get(name)
    kept = None if archive is None else path.parent / archive.name
    if not download and (kept is None or not kept.is_file()):
        return find(Path(name))  # whose error says what to do
    with _half(path) as half:
        if archive is None:
            _hub(name).write_shards(half, progress)
        elif kept is not None and kept.is_file():
            _unpack(archive, kept, half)
        else:
            partial = half / archive.name
            _download(archive, partial, progress, _by_hand(name, path))
            _unpack(archive, partial, half)
            partial.unlink()
    return path


def _hub(name: str) -> HubSet:
    match = _HUB.fullmatch(name)
    if match is None or ".." in match[4]:
        raise DataError(
            f"{name} names no data set of Hugging Face: expected hf:OWNER/NAME@REVISION.",
            action="Name a branch, a tag or, best, a commit, such as hf:ylecun/mnist@main.",
        )
    owner, repository, config, revision = match.groups()
    return HubSet(f"{owner}/{repository}", config, revision)


def _by_hand(name: str, path: Path) -> str:
    archive = ARCHIVES.get(name)
    if archive is None:
        return f"Or put its images as shards into that folder (docs/data.md); {VARIABLE} moves it."
    return (
        f"Or put the file {archive.url} into {path.parent} and run: {COMMAND} {name}. "
        f"{VARIABLE} moves the folder."
    )


@contextlib.contextmanager
def _half(path: Path) -> Iterator[Path]:
    """Offer a folder that becomes ``path`` when it is complete."""
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch(path.parent, path.name) as name:
            half = name("half")
            half.mkdir()
            yield half
            # The name promises whole files, after a loss of power too.
            for file in filter(Path.is_file, half.iterdir()):
                with file.open("rb") as opened:
                    sync_data(opened.fileno())
            if not path.exists():  # another command was faster
                half.rename(path)


def _download(archive: Archive, target: Path, progress: Progress, by_hand: str) -> None:
    done = 0
    try:
        # The addresses are those above.
        with (
            urllib.request.urlopen(archive.url, timeout=TIMEOUT_S) as answer,  # noqa: S310
            target.open("wb") as file,
        ):
            while done <= archive.size and (piece := answer.read(_PIECE)):
                done += file.write(piece)
                progress(done, archive.size)
    except (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise DataError(
            f"{archive.url} cannot be downloaded ({str(error)[:120]}).", action=by_hand
        ) from error
    if done != archive.size:
        raise DataError(
            f"{archive.url} has another length than was published: expected {archive.size} bytes, "
            f"got {'more' if done > archive.size else done}.",
            action=f"Try again. {by_hand}",
        )


def _unpack(archive: Archive, file: Path, folder: Path) -> None:
    """Write the files of an archive into a folder, if it is the one that was published."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != archive.sha256:
        raise DataError(
            f"{file} is not the archive that was published: expected the SHA-256 "
            f"{archive.sha256[:16]}..., got {digest[:16]}...",
            action="Remove it if it was put there by hand, and download it again.",
        )
    with tarfile.open(file) as opened_tar:
        for member in opened_tar:
            name = Path(member.name).name
            content = opened_tar.extractfile(member) if name in archive.files.all else None
            if content is not None:
                with (folder / name).open("wb") as target:
                    shutil.copyfileobj(content, target)
