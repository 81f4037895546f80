"""Small pictures of noise, their files, and members of archives."""

import io
import tarfile

import numpy as np
from PIL import Image


def encoded(image, form="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(width=12, height=8, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def png(seed=0):
    return encoded(picture(seed=seed))


def add(archive, name, data=b"", **fields):
    """Add a member to an open tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))
