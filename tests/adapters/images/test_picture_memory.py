"""Every picture is converted to the numbers of old, in memory that its pixels alone decide."""

import io
import itertools
import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images import decoding
from fcil_adapters.images.decoding import MAX_TIFF_PIECE, decode, preprocess
from fcil_protocol.errors import DataError

SIDE = 1400
# Its own 4 bytes for a pixel, and once more as many for a copy or the result.
PER_PIXEL = 8
WEBP_MORE = 8  # libwebp has two canvases while it answers
SLACK = 16 << 20

CHILD = """
import json, sys
from pathlib import Path
from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import decode, preprocess

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

def look(path):
    p = Preprocessing(size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    preprocess(decode(Path(path).read_bytes()), p)

small, *large = sys.argv[1:]
look(small)
found = [peak()]
for path in large:
    look(path)
    found.append(peak())
print(json.dumps(found))
"""


def prep(size=8, **options):
    return Preprocessing(size=size, mean=(0.5,) * 3, std=(0.5,) * 3, **options)


def to_rgb(image):
    """The definition: the whole picture at once, wide where it must be."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        values = np.rint(np.clip(values * (255.0 if values.max() <= 1 else 1.0), 0, 255))
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        ground = Image.new("RGBA", colours.size, (128, 128, 128, 255))
        return Image.alpha_composite(ground, colours).convert("RGB")
    return image.convert("RGB")


def drawn(mode, seed=0, size=(37, 23)):
    """Return random pixels in a mode, with all that its numbers can be."""
    rng = np.random.default_rng(seed)
    width, height = size
    if mode in ("F", "unit"):
        values = (
            rng.normal(100, 120, (height, width)) if mode == "F" else rng.random((height, width))
        )
        values.flat[:3] = (np.nan, -np.inf, -1)
        if mode == "F":
            values.flat[3] = np.inf
        return Image.fromarray(values.astype(np.float32))
    if mode == "I":
        return Image.fromarray(rng.integers(-5000, 90_000, (height, width), np.int32))
    if mode == "I;16B":
        return Image.frombytes("I;16B", size, rng.bytes(2 * width * height))
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65_536, (height, width), np.uint16))
    colours = Image.fromarray(rng.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    if mode.startswith("transparent"):
        named = mode.partition(" ")[2]
        plain = colours.convert("RGB").convert(named)
        key = plain.getpixel((5, 5))
        plain.info["transparency"] = key
        plain.putpixel((7, 8), key)
        return plain
    if mode in ("LA", "PA", "RGBa"):
        return colours.convert("LA" if mode == "PA" else "RGBA").convert(mode)
    return colours.convert("RGB").convert(mode) if mode != "RGBA" else colours


MODES = (
    "1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "I",
    "I;16", "I;16B", "F", "unit", "transparent RGB", "transparent L", "transparent P",
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("box", [1, 7, 100, 1 << 20])
def test_box_by_box_is_as_the_whole_at_once(mode, box, monkeypatch):
    monkeypatch.setattr(decoding, "_BOX", box)
    image = drawn(mode)
    assert np.array_equal(preprocess(image, prep(16)), preprocess(to_rgb(image), prep(16)))
    assert np.array_equal(decoding._to_byte_colours(image).convert("RGB"), to_rgb(image))


@pytest.mark.parametrize("interpolation", list(decoding._RESAMPLING))
@pytest.mark.parametrize("mode", ["1", "L", "F", "I;16"])
def test_what_is_grey_is_resized_as_three_equal_colours_are(mode, interpolation):
    for size, crop in itertools.product(((37, 23), (5, 60), (8, 8)), (1.0, 0.9)):
        image, p = drawn(mode, size=size), prep(interpolation=interpolation, crop_pct=crop)
        assert np.array_equal(preprocess(image, p), preprocess(to_rgb(image), p))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_pictures_are_turned_as_pillow_turns_them(orientation, form):
    exif, data = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    drawn("RGB").save(data, form, exif=exif)
    with Image.open(data) as image:
        assert np.array_equal(decode(data.getvalue()), ImageOps.exif_transpose(image))


def save(path, mode, form, **options):
    drawn(mode, size=(64, 64)).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path, form, **options)  # fmt: skip
    return str(path)


def test_no_picture_takes_more_memory_than_its_pixels_decide(tmp_path):
    small = tmp_path / "small"
    drawn("RGBA").save(small, "PNG")
    given = {
        "F": save(tmp_path / "f", "F", "TIFF", compression="tiff_adobe_deflate"),
        "I": save(tmp_path / "i", "I", "TIFF", compression="tiff_adobe_deflate"),
        "I;16": save(tmp_path / "i16", "I;16", "PNG"),
        "RGBA": save(tmp_path / "rgba", "RGBA", "PNG"),
        "LA": save(tmp_path / "la", "LA", "PNG"),
        "P": save(tmp_path / "p", "P", "PNG", transparency=3),
        "WEBP": save(tmp_path / "w", "RGBA", "WEBP", quality=10, method=0),
    }
    command = [sys.executable, "-c", CHILD, str(small), *given.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    base, *peaks = json.loads(done.stdout)
    pixels = SIDE * SIDE
    for name, peak in zip(given, peaks, strict=True):
        most = PER_PIXEL + (WEBP_MORE if name == "WEBP" else 0)
        assert peak - base <= most * pixels + SLACK, (name, (peak - base) / pixels)


def tiled(width, height, *, tag_width=322, tag_height=323, offset=324, counts=325):
    """Return a TIFF of one pixel in a tile of zeros; the tile is as large as said."""
    body = zlib.compress(bytes(64))
    tags = [
        (256, 1), (257, 1), (258, 8), (259, 8), (262, 1), (277, 1),
        (tag_width, width), (tag_height, height), (offset, 8), (counts, len(body)),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags))
    ifd = struct.pack("<H", len(tags)) + table + bytes(4)
    start = 8 + len(body) + len(body) % 2
    return struct.pack("<2sHI", b"II", 42, start) + body.ljust(start - 8, b"\0") + ifd


def test_a_tile_that_is_larger_than_any_picture_is_refused_before_it_is_unpacked():
    assert decode(tiled(8, 8)).size == (1, 1)
    with pytest.raises(
        DataError, match="strip or tile of a TIFF may have at most 341 MiB, got 858"
    ):
        decode(tiled(30_000, 30_000))
    assert MAX_TIFF_PIECE >> 20 == 341
