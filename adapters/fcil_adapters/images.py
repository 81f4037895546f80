"""Pictures: from the bytes of a file to the backbone's input, the same on every device.

Torch-free. Where the files lie is the business of `image_source`; its names that other
modules need are offered here as well.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fcil_adapters.contract import Preprocessing
from fcil_adapters.image_source import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    Entry,
    ImageSource,
    Listing,
    open_source,
)
from fcil_protocol.errors import ConfigError, DataError

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_FILE_BYTES",
    "MAX_PIXELS",
    "Entry",
    "ImageSource",
    "Listing",
    "decode",
    "digest",
    "open_source",
    "preprocess",
]

# The size at which Pillow begins to speak of a decompression bomb: 256 MiB as RGB.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3
# Content decides, not the suffix; formats whose readers start other programs are left out.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MAX_ASPECT = 8
_GREY = (128, 128, 128, 255)
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def digest(data: bytes) -> bytes:
    """Return the SHA-256 of a file's bytes (32 bytes), by which an image is known."""
    return hashlib.sha256(data).digest()


def decode(data: bytes) -> Image.Image:
    """Decode a picture, turned upright as its EXIF orientation says; any colour mode.

    Of an animation the first frame counts.

    Raises:
        DataError: the bytes are empty, no known image format, damaged, or more than
            `MAX_PIXELS` pixels.
    """
    if not data:
        raise DataError("the image file is empty.", action="Replace or remove it.")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image)
            image.load()
            # Without orientation this is a copy, which the closed file does not touch.
            return ImageOps.exif_transpose(image)
    except (DataError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels("more") from error
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
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


def _too_many_pixels(got: str) -> DataError:
    return DataError(
        f"an image may have at most {MAX_PIXELS} pixels, got {got}.", action="Scale it down."
    )


def preprocess(image: Image.Image, p: Preprocessing) -> NDArray[np.uint8]:
    """Turn a decoded picture into the backbone's input: uint8 (S, S, 3), RGB.

    Colours: transparent pixels are laid over mid-grey, so that neither a black nor a white
    drawing vanishes; 16-bit greys keep their upper range (65535 becomes 255); float
    pictures are read as [0, 1], or as [0, 255] when a value exceeds 1.

    Geometry: as `Preprocessing` says. Pictures longer than 8:1 are first cut to the central
    8:1, since only their centre is used.

    Raises:
        ConfigError: the interpolation is unknown.
    """
    resampling = _RESAMPLING.get(p.interpolation)
    if resampling is None:
        raise ConfigError(
            f"unknown interpolation {p.interpolation!r}; known are {', '.join(_RESAMPLING)}."
        )
    rgb = _cut_strip(_to_rgb(image))
    target = max(p.size, round(p.size / p.crop_pct))
    scale = target / min(rgb.size)
    width, height = (max(target, round(side * scale)) for side in rgb.size)
    if (width, height) != rgb.size:
        rgb = rgb.resize((width, height), resampling)
    left, top = (width - p.size) // 2, (height - p.size) // 2
    square = rgb.crop((left, top, left + p.size, top + p.size))
    return np.array(square, dtype=np.uint8)  # (S, S, 3)


def _cut_strip(image: Image.Image) -> Image.Image:
    # A strip of one pixel by a million would become gigabytes when its short side grows.
    width, height = image.size
    limit = _MAX_ASPECT * min(width, height)
    if max(width, height) <= limit:
        return image
    new_width, new_height = min(width, limit), min(height, limit)
    left, top = (width - new_width) // 2, (height - new_height) // 2
    return image.crop((left, top, left + new_width, top + new_height))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        return _grey(_float_to_byte(np.asarray(image, dtype=np.float64)))
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return _grey((values + 128) // 257)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        ground = Image.new("RGBA", colours.size, _GREY)
        return Image.alpha_composite(ground, colours).convert("RGB")
    return image.convert("RGB")


def _float_to_byte(values: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return np.rint(np.clip(finite * (255.0 if finite.max() <= 1 else 1.0), 0, 255))


def _grey(values: NDArray[Any]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
