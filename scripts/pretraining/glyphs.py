"""Letters in eight by eight pixels: pictures that look like scanned digits and hold none.

A student that learns from photographs alone forgets what its starting weights know of strokes.
These pictures are what it holds on to (`Recipe.hold`): letters of the typefaces that come with
matplotlib, each turned, sheared and scaled at random, then reduced as the digits of NIST were for
the UCI repository: black and white in 32 x 32, of each block of 4 x 4 the number of set pixels
(https://archive.ics.uci.edu/dataset/80).
"""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fcil_protocol.storage.atomic_files import write_atomic

_FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral")  # and their bold and italic
_SCRIPTS = (range(0x41, 0x250), range(0x370, 0x500))  # Latin; Greek and Cyrillic
_SIDE, _BLOCK = 32, 4
_PIXELS, _FONT = 96, 72  # side of the canvas on which a letter is drawn, and the letter's size
_TURN, _SHEAR, _SCALE = 0.3, 0.35, (0.75, 1.05)  # radians; of the height; of the side
_SET = 100  # of 255: from this shade on a pixel of the 32 x 32 is set
_WHITE = 255
_STAMP = (1980, 1, 1, 0, 0, 0)  # of all members, so that the same numbers give the same file


def faces() -> list[Path]:
    """Return the files of the typefaces, by name."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return sorted(p for p in folder.glob("*.ttf") if p.stem.startswith(_FACES))


def letters(face: Path) -> list[str]:
    """Return the letters that a typeface has, no digit among them."""
    known = FT2Font(str(face)).get_charmap()
    return [chr(c) for codes in _SCRIPTS for c in codes if c in known and chr(c).isalpha()]


def write(path: Path, count: int, seed: int = 0) -> None:
    """Write a zip of ``train/<letter>/<number>.png``, grey, 8 x 8.

    Args:
        path: of the zip.
        count: of the pictures.
        seed: of letters, typefaces and distortions.

    Raises:
        StorageError: it cannot be written.
    """
    dice = np.random.default_rng(seed)
    found = [(face, letters(face)) for face in faces()]
    fonts = [(ImageFont.truetype(str(f), _FONT), known) for f, known in found if known]
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number in range(count):
            font, known = fonts[dice.integers(len(fonts))]
            letter = known[dice.integers(len(known))]
            out = BytesIO()
            Image.fromarray(drawn(letter, font, dice)).save(out, "PNG")
            member = zipfile.ZipInfo(f"train/U+{ord(letter):04X}/{number:06d}.png", _STAMP)
            archive.writestr(member, out.getvalue())
    write_atomic(path, made.getvalue(), mode=0o644)


def drawn(
    letter: str, font: ImageFont.FreeTypeFont, dice: np.random.Generator
) -> NDArray[np.uint8]:
    """Return one picture of a letter, (8, 8), in the 17 shades of the digits."""
    canvas = Image.new("L", (_PIXELS, _PIXELS))
    ImageDraw.Draw(canvas).text(
        (_PIXELS / 2, _PIXELS / 2), letter, fill=_WHITE, font=font, anchor="mm"
    )
    box = canvas.getbbox() or (0, 0, _PIXELS, _PIXELS)
    turn, shear = dice.uniform(-_TURN, _TURN), dice.uniform(-_SHEAR, _SHEAR)
    # Letters as the digits fill their square: by height, and wide ones no wider than it.
    scale = max(box[2] - box[0], box[3] - box[1]) / (_SIDE * dice.uniform(*_SCALE))
    inverse = (
        scale
        * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        @ np.array([[1.0, shear], [0.0, 1.0]])
    )
    middle = np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2])
    moved = middle - inverse @ np.full(2, _SIDE / 2)
    small = canvas.transform(
        (_SIDE, _SIDE),
        Image.Transform.AFFINE,
        (*inverse[0], moved[0], *inverse[1], moved[1]),
        Image.Resampling.BILINEAR,
    )
    pixels = np.asarray(small) >= _SET
    side = _SIDE // _BLOCK
    counts = pixels.reshape(side, _BLOCK, side, _BLOCK).sum((1, 3))  # 0 to 16
    return (counts * _WHITE // _BLOCK**2).astype(np.uint8)
