"""Views of a batch: crop, flip, colours and quarter turns, on the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_RATIO = 4 / 3  # of a crop's sides, at most
_JITTER = 0.4
_SATURATION = 0.4
_GREY = 0.2  # share of the pictures that lose their colours


def turn(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each picture (B, C, S, S) by its number of quarters (B,)."""
    turned = torch.stack([torch.rot90(images, k, (2, 3)) for k in range(4)])  # (4, B, C, S, S)
    return turned[turns, torch.arange(len(images), device=images.device)]


def view(
    images: Tensor,
    size: int,
    areas: tuple[float, float],
    dice: torch.Generator,
    colours: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return one random view of each picture, and which of them are mirrored.

    Args:
        images: (B, 3, S, S) in [0, 1], of any side.
        size: side of the view.
        areas: smallest and largest share of the picture that a view shows.
        dice: lies on the CPU, so that a view does not depend on the device.
        colours: strength of the changes of colours; 0: none.

    Returns:
        (B, 3, size, size) in [0, 1], and (B,) bool on the CPU.
    """
    crops = _crops(len(images), areas, dice)
    seen = functional.grid_sample(
        images,
        functional.affine_grid(
            crops.to(images.device),
            [len(images), 3, size, size],
            align_corners=False,
        ),
        padding_mode="reflection",
        align_corners=False,
    )
    chances = torch.rand(len(images), 4, generator=dice).to(images.device)
    return _recoloured(seen, chances, colours), crops[:, 0, 0] < 0


def _crops(count: int, areas: tuple[float, float], dice: torch.Generator) -> Tensor:
    """Return the map from a view's coordinates to the picture's, both in [-1, 1]: (B, 2, 3)."""
    share, ratio, x, y, flip = torch.rand(5, count, generator=dice)
    side = (areas[0] + (areas[1] - areas[0]) * share).sqrt()
    stretch = _RATIO ** (ratio - 0.5)
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = width * torch.where(flip < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = height
    theta[:, 0, 2] = (2 * x - 1) * (1 - width)
    theta[:, 1, 2] = (2 * y - 1) * (1 - height)
    return theta


def _recoloured(images: Tensor, dice: Tensor, strength: float) -> Tensor:
    """Change brightness, contrast and saturation; some pictures become grey."""
    bright, contrast, saturation, grey = dice.view(-1, 4, 1, 1, 1).unbind(1)
    x = images * (1 + strength * _JITTER * (2 * bright - 1))
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (1 + strength * _JITTER * (2 * contrast - 1))
    shade = x.mean(1, keepdim=True)
    colour = torch.where(
        grey < strength * _GREY, 0.0, 1 + strength * _SATURATION * (2 * saturation - 1)
    )
    return (shade + (x - shade) * colour).clamp(0, 1)
