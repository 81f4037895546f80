"""Pictures: from the bytes of a file to the backbone's input, the same on every device.

Torch-free. `sources` finds the files; this module also offers its names that other modules need.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin
from PIL.ExifTags import Base

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.image_source import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    ImageEntry,
    ImageSource,
    Listing,
)
from fcil_adapters.images.sources import open_source
from fcil_protocol.errors import ConfigError, DataError

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_FILE_BYTES",
    "MAX_PIXELS",
    "ImageEntry",
    "ImageSource",
    "Listing",
    "decode",
    "digest",
    "open_source",
    "preprocess",
    "sample_folder",
]

# The size from which Pillow warns of a decompression bomb: 256 MiB as RGB.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3
# Bound of one unpacking by libtiff; a tile may be larger than its picture.
MAX_TIFF_PIECE = 4 * MAX_PIXELS  # bytes
# The content decides, not the suffix; formats whose readers start other programs are left out.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_SAMPLED = 512  # images of a folder, for the ranges of numbers in a model
_MAX_ASPECT = 8
_GREY = (128, 128, 128, 255)
_BOX = 1 << 18  # pixels per conversion
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def digest(data: bytes) -> bytes:
    """Return the SHA-256 of a file's bytes (32 bytes), which identifies an image."""
    return hashlib.sha256(data).digest()


def decode(data: bytes) -> Image.Image:
    """Decode a picture, turned upright as its EXIF orientation says; any colour mode.

    An animation gives its first frame.

    Raises:
        DataError: the bytes are empty, no known image format, damaged, or more than `MAX_PIXELS`
            pixels; or a TIFF whose strips or tiles are larger than `MAX_TIFF_PIECE`.
    """
    if not data:
        raise DataError("the image file is empty.", action="Replace or remove it.")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image)
            _check_piece(image)
            image.load()
            # The returned picture is a copy that no longer needs the closed file.
            turn = _TURNS.get(image.getexif().get(Base.Orientation, 1))
            return image.copy() if turn is None else image.transpose(turn)
    except (DataError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels("more") from error
    except Exception as error:  # damaged bytes make decoders raise anything
        reason = str(error).split("<_io")[0].rstrip(" :.") or type(error).__name__
        raise DataError(
            f"the image cannot be decoded ({reason[:120]}).", action="Replace or remove it."
        ) from error


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _too_many_pixels(f"{width} x {height}")
    if width * height == 0:
        raise DataError("the image has no pixels.", action="Replace or remove it.")


def _check_piece(image: Image.Image) -> None:
    """Bound what libtiff allocates: a strip or tile, independent of the picture's size."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return
    tags = image.tag_v2
    width, height = image.size
    if TiffImagePlugin.TILEWIDTH in tags:
        width, height = tags[TiffImagePlugin.TILEWIDTH], tags[TiffImagePlugin.TILELENGTH]
    else:
        height = min(height, tags.get(TiffImagePlugin.ROWSPERSTRIP, height))
    bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
    samples = max(len(bits), tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1))
    if (size := width * height * max(bits) * samples // 8) > MAX_TIFF_PIECE:
        raise DataError(
            f"a strip or tile of a TIFF may have at most {MAX_TIFF_PIECE >> 20} MiB, got "
            f"{size >> 20} MiB.",
            action="Save the image with smaller ones, or as PNG.",
        )


def _too_many_pixels(got: str) -> DataError:
    return DataError(
        f"an image may have at most {MAX_PIXELS} pixels, got {got}.", action="Scale it down."
    )


def preprocess(image: Image.Image, p: Preprocessing) -> NDArray[np.uint8]:
    """Turn a decoded picture into the backbone's input: uint8 (S, S, 3), RGB.

    Colours: transparent pixels are laid over mid-grey, so that neither a black nor a white drawing
    vanishes; 16-bit greys keep their upper range (65535 becomes 255); float pictures are read as
    [0, 1], or as [0, 255] when a value exceeds 1.

    Geometry: as `Preprocessing` says. Pictures longer than 8:1 are first cut to the central 8:1,
    since only their centre is used.

    Raises:
        ConfigError: the interpolation is unknown.
    """
    resampling = _RESAMPLING.get(p.interpolation)
    if resampling is None:
        raise ConfigError(
            f"unknown interpolation {p.interpolation!r}; known are {', '.join(_RESAMPLING)}."
        )
    picture = _cut_strip(_to_byte_colours(image))
    target = max(p.size, round(p.size / p.crop_pct))
    scale = target / min(picture.size)
    width, height = (max(target, round(side * scale)) for side in picture.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), resampling)
    left, top = (width - p.size) // 2, (height - p.size) // 2
    square = picture.crop((left, top, left + p.size, top + p.size))
    return np.array(square.convert("RGB"), dtype=np.uint8)  # (S, S, 3)


def _cut_strip(image: Image.Image) -> Image.Image:
    # A strip of one pixel by a million would become gigabytes when its short side grows.
    width, height = image.size
    limit = _MAX_ASPECT * min(width, height)
    if max(width, height) <= limit:
        return image
    new_width, new_height = min(width, limit), min(height, limit)
    left, top = (width - new_width) // 2, (height - new_height) // 2
    return image.crop((left, top, left + new_width, top + new_height))


def _to_byte_colours(image: Image.Image) -> Image.Image:
    """Return the image as RGB, or L if it is grey: one byte for each colour of a pixel.

    Wider intermediate values exist for one box of pixels at a time, so that the memory stays that
    of the picture and the result.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        return _grey_of_floats(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _grey_of_integers(image)
    if image.has_transparency_data:
        return _over_grey(image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _boxes(image: Image.Image) -> Iterator[tuple[tuple[int, int], Image.Image]]:
    """Yield all parts of a picture with their upper left corners, `_BOX` pixels at most each."""
    width, height = image.size
    columns = min(width, _BOX)
    rows = max(1, _BOX // columns)
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            corner = (min(left + columns, width), min(top + rows, height))
            yield (left, top), image.crop((left, top, *corner))


def _grey_of_floats(image: Image.Image) -> Image.Image:
    top = max(_finite(part).max() for _, part in _boxes(image))
    factor = 255.0 if top <= 1 else 1.0
    grey = Image.new("L", image.size)
    for corner, part in _boxes(image):
        values = np.rint(np.clip(_finite(part) * factor, 0, 255))
        grey.paste(Image.fromarray(values.astype(np.uint8)), corner)
    return grey


def _finite(part: Image.Image) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(part, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _grey_of_integers(image: Image.Image) -> Image.Image:
    grey = Image.new("L", image.size)
    for corner, part in _boxes(image):
        values = (np.clip(np.asarray(part).astype(np.int64), 0, 65535) + 128) // 257
        grey.paste(Image.fromarray(values.astype(np.uint8)), corner)
    return grey


def _over_grey(image: Image.Image) -> Image.Image:
    rgb = Image.new("RGB", image.size)
    for corner, part in _boxes(image):
        colours = part.convert("RGBA")
        ground = Image.new("RGBA", colours.size, _GREY)
        rgb.paste(Image.alpha_composite(ground, colours).convert("RGB"), corner)
    return rgb


def sample_folder(folder: Path, p: Preprocessing, most: int = MOST_SAMPLED) -> NDArray[np.uint8]:
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
    images = [image for i in np.unique(index) if (image := _read_sample(found[i], p)) is not None]
    if not images:
        raise DataError(
            f"{folder} holds no image that can be read.", action="Give a folder with images."
        )
    return np.stack(images)


def _read_sample(path: Path, p: Preprocessing) -> NDArray[np.uint8] | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:  # a pipe never ends
            return None
        return preprocess(decode(path.read_bytes()), p)
    except (OSError, DataError):  # one picture of many
        return None
