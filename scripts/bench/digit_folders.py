"""Scikit-learn's digits as picture files in folders by class, for federations of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def write_digit(folder: Path, raw: Any, i: int) -> None:
    """Write one of scikit-learn's digits, 32 pixels wide, into the folder of its class.

    Args:
        folder: of the classes' folders.
        raw: what `sklearn.datasets.load_digits` returns.
        i: its number.
    """
    target = folder / str(raw.target[i])
    target.mkdir(parents=True, exist_ok=True)
    pixels = (raw.images[i] * (255 / 16)).round().astype(np.uint8)  # 0..16 -> 0..255
    Image.fromarray(pixels).resize((32, 32)).save(target / f"{i}.png")
