"""Sample images of a folder, for the ranges of numbers in a model (torch-free)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import IMAGE_SUFFIXES, MAX_FILE_BYTES, decode, preprocess
from fcil_protocol.errors import DataError

MOST = 512


def sample(folder: Path, p: Preprocessing, most: int = MOST) -> NDArray[np.uint8]:
    """Return images of a folder and its subfolders, preprocessed: (N, S, S, 3), N <= most.

    They are taken at equal distances from all, by name, so that each class folder has its share.
    Unreadable ones are passed over.

    Raises:
        DataError: the folder is missing, or holds no readable image.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}.", action="Give a folder with images.")
    found = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
    index = np.linspace(0, len(found) - 1, min(most, len(found))).astype(np.int64)
    images = [image for i in np.unique(index) if (image := _read(found[i], p)) is not None]
    if not images:
        raise DataError(
            f"{folder} holds no image that can be read.", action="Give a folder with images."
        )
    return np.stack(images)


def _read(path: Path, p: Preprocessing) -> NDArray[np.uint8] | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:  # a pipe never ends
            return None
        return preprocess(decode(path.read_bytes()), p)
    except (OSError, DataError):  # one picture of many
        return None
