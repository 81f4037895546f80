"""Random views of image batches; every image draws its own parameters.

All draws come from an explicit CPU generator, so they do not depend on the device that
computes the images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

Augmentation = Literal["flip_jitter", "jitter", "crop_flip", "none"]

BRIGHTNESS = 63 / 255  # half width of the brightness factor around 1 (PILoRA's code)
CROP_AREA = (0.08, 1.0)  # share of the picture's area (torchvision's RandomResizedCrop)
CROP_RATIO = (3 / 4, 4 / 3)  # width / height


def augment(images: Tensor, name: Augmentation, generator: Generator) -> Tensor:
    """Return a random view of each image.

    Args:
        images: (B, S, S, 3), uint8 or float in [0, 255].
        name: ``flip_jitter`` mirrors half of the images and changes the brightness by up to 63/255;
            ``jitter`` changes the brightness only, for pictures whose mirror image means something
            else (digits, letters); ``crop_flip`` takes a random part, scales it to S x S and
            mirrors half; ``none`` changes nothing.
        generator: a CPU generator; the only source of randomness.

    Returns:
        (B, S, S, 3) float32 in [0, 255].
    """
    view = images.to(torch.float32)
    for step in _STEPS[name]:
        view = step(view, generator)
    return view


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left to right with probability one half."""
    mirrored = _uniform(len(images), 0, 1, generator) < 0.5  # (B,)
    return torch.where(_per_image(mirrored, images), images.flip(2), images)


def jitter_brightness(images: Tensor, generator: Generator) -> Tensor:
    """Multiply each image by a factor in [1 - 63/255, 1 + 63/255], clipped to [0, 255]."""
    factor = _uniform(len(images), 1 - BRIGHTNESS, 1 + BRIGHTNESS, generator)  # (B,)
    return (images * _per_image(factor, images)).clamp(0, 255)


def crop(images: Tensor, generator: Generator) -> Tensor:
    """Scale a random part of each image, of random area and shape, to full size (bilinear)."""
    B, S = images.shape[:2]
    area = _uniform(B, *CROP_AREA, generator)
    ratio = _uniform(B, math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1]), generator).exp()
    width = (area * ratio).sqrt().clamp_max(1)  # (B,) share of the side
    height = (area / ratio).sqrt().clamp_max(1)
    x = (2 * _uniform(B, 0, 1, generator) - 1) * (1 - width)  # centre in [-1, 1]
    y = (2 * _uniform(B, 0, 1, generator) - 1) * (1 - height)
    zero = torch.zeros(B)
    rows = (torch.stack([width, zero, x], 1), torch.stack([zero, height, y], 1))
    affine = torch.stack(rows, 1).to(images.device)  # (B, 2, 3)
    grid = functional.affine_grid(affine, [B, 3, S, S], align_corners=False)  # (B, S, S, 2)
    pixels = functional.grid_sample(
        images.permute(0, 3, 1, 2), grid, padding_mode="border", align_corners=False
    )
    return pixels.permute(0, 2, 3, 1)  # (B, S, S, 3)


def _uniform(count: int, low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1).to(images.device)


_Step = Callable[[Tensor, Generator], Tensor]
_STEPS: Mapping[Augmentation, tuple[_Step, ...]] = MappingProxyType(
    {
        "flip_jitter": (flip, jitter_brightness),
        "jitter": (jitter_brightness,),
        "crop_flip": (crop, flip),
        "none": (),
    }
)
