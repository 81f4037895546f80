"""Draw the four probe pictures that ship with the package, always the same pixels.

Two sides of a federation compare their backbones' features of these pictures before they
learn together. Their odd shape (64 x 48) makes resizing and cropping part of the comparison.

    python scripts/make_probe_images.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT = 64, 48
FOLDER = Path(__file__).parents[1] / "adapters" / "fcil_adapters" / "data" / "probe"

Picture = NDArray[np.uint8]  # (HEIGHT, WIDTH, 3)

# Integers only: floating-point functions may round differently on another machine.
_Y, _X = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.int64)


def gradient() -> Picture:
    """Draw colours that change slowly in three directions."""
    return _picture(_X * 255 // (WIDTH - 1), _Y * 255 // (HEIGHT - 1), (_X + _Y) * 255 // 110)


def discs() -> Picture:
    """Draw three overlapping discs of the primary colours on grey."""
    return _picture(*(40 + 180 * _disc(x, y, 13) for x, y in ((24, 18), (40, 18), (32, 32))))


def stripes() -> Picture:
    """Draw diagonal stripes of different widths, one per colour."""
    return _picture(
        ((_X + _Y) // 5 % 2) * 230, ((_X - _Y) // 8 % 2) * 200, ((_X + 2 * _Y) // 13 % 2) * 250
    )


def blocks() -> Picture:
    """Draw squares of scattered colours around a dark ring."""
    cell = (_X // 8) * 7 + (_Y // 8) * 13
    ring = _disc(32, 24, 18) - _disc(32, 24, 10)
    return _picture(*((cell * k % 256) * (1 - ring) for k in (37, 59, 101)))


def _disc(x: int, y: int, radius: int) -> NDArray[np.int64]:
    inside: NDArray[np.int64] = ((_X - x) ** 2 + (_Y - y) ** 2 <= radius**2).astype(np.int64)
    return inside


def _picture(*channels: NDArray[np.int64]) -> Picture:
    return np.stack(channels, axis=2).astype(np.uint8)


PICTURES = {
    "probe_0.png": gradient,
    "probe_1.png": discs,
    "probe_2.png": stripes,
    "probe_3.png": blocks,
}


def main() -> None:
    """Write the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        Image.fromarray(draw()).save(folder / name, optimize=True)


if __name__ == "__main__":
    main()
