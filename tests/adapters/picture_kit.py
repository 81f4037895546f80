"""Small pictures of noise, and their files."""

import io

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
