"""Input images of a prediction: found in a stable order, decoded ahead of the computation."""

from __future__ import annotations

import itertools
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import IMAGE_SUFFIXES, MAX_FILE_BYTES, decode, preprocess
from fcil_adapters.images.folder_walk import MAX_DEPTH, depth_below
from fcil_protocol.errors import DataError

U8 = NDArray[np.uint8]

STDIN = "-"


@dataclass(frozen=True)
class InputImage:
    """One image.

    Attributes:
        name: as given.
        data: its bytes, if already read; else they are read from the path ``name``.
    """

    name: str
    data: bytes | None = None


@dataclass(frozen=True)
class Decoded:
    """A decoded image, or its fault.

    Attributes:
        pixels: (S, S, 3), preprocessed; None: it cannot be used.
        fault: the reason as a sentence.
    """

    name: str
    pixels: U8 | None
    fault: str = ""


def is_image(name: str) -> bool:
    """Return True if a file in a folder counts as an image, by its name."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122


def walk(folder: Path, faults: list[str] | None = None) -> Iterator[Path]:
    """Yield the images in a folder and those below it, sorted within each, without hidden ones.

    Links to folders are not followed. Folders that cannot be read are added to ``faults``.
    """

    def report(error: OSError) -> None:
        if faults is not None:
            faults.append(f"folder {error.filename} cannot be read ({error.strerror}).")

    for directory, folders, files in os.walk(folder, onerror=report):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if folders and depth_below(folder, directory) >= MAX_DEPTH:  # the walk is recursive
            if faults is not None:
                faults.append(f"folder {directory} is too deep: what is below it is left out.")
            folders.clear()
        for name in sorted(filter(is_image, files)):
            yield Path(directory, name)


def find(asked: Sequence[str], stdin: bytes | None) -> tuple[list[InputImage], list[str]]:
    """Return the images that arguments name, and one sentence per unreadable folder.

    Args:
        asked: files, folders, or `STDIN`.
        stdin: content of standard input.

    Raises:
        DataError: an argument is neither, cannot be read, or is a folder without images.
    """
    found: list[InputImage] = []
    faults: list[str] = []
    for one in asked:
        if one == STDIN:
            found.append(InputImage(STDIN, stdin or b""))
        elif _is_folder(one):
            inside = [InputImage(str(p)) for p in walk(Path(one), faults)]
            if not inside and not faults:
                raise DataError(
                    f"there is no image in {one}.",
                    action=f"Images are files that end in {', '.join(sorted(IMAGE_SUFFIXES))}.",
                )
            found += inside
        else:
            found.append(InputImage(one))
    return found, faults


def _is_folder(asked: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(asked).st_mode)  # noqa: PTH116  Path makes "." of ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"there is no image or folder {asked[:200]} ({reason}).", action="Check the path."
        ) from error


def batches(
    pictures: Iterable[InputImage], preprocessing: Preprocessing, *, size: int, threads: int
) -> Iterator[list[Decoded]]:
    """Yield all images in order, decoded, ``size`` at a time; later ones decode meanwhile.

    At most three batches are in memory.
    """
    coming: deque[list[Future[Decoded]]] = deque()
    left = iter(pictures)
    with ThreadPoolExecutor(threads, "decode") as pool:
        try:
            while True:
                while len(coming) < 2 and (some := list(itertools.islice(left, size))):
                    coming.append([pool.submit(_decode, one, preprocessing) for one in some])
                if not coming:
                    return
                yield [future.result() for future in coming.popleft()]
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(picture: InputImage, preprocessing: Preprocessing) -> Decoded:
    try:
        data = _read(picture.name) if picture.data is None else picture.data
        return Decoded(picture.name, preprocess(decode(data), preprocessing))
    except DataError as error:
        return Decoded(picture.name, None, error.message)
    except MemoryError:
        return Decoded(picture.name, None, "the image does not fit into memory.")


def _read(name: str) -> bytes:
    try:
        # Opening a pipe would block for ever.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DataError("it is not a file; to pass an image from another program, use -.")
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the image cannot be read ({reason}).") from error
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"the image has more than {MAX_FILE_BYTES} bytes.")
    return data
