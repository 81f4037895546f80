"""Clipping and Gaussian noise for statistics of images (torch-free).

The unit of protection is one image's contribution: two sets of images are neighbours if one image
of the first is a blank in the second, which adds nothing to any sum (Kairouz et al., Practical and
Private (Deep) Learning without Sampling or Shuffling, 2021, section 2: zero-out). Counts of images
are the same in both, so they are no secret. A feature is clipped to length C before it enters a
sum, so blanking an image moves the sums of all classes together by at most C, and the scatter of
residuals that are clipped to C by at most C^2 in Frobenius norm. Noise of standard deviation z
times that makes each of them a Gaussian mechanism of noise multiplier z (Dwork and Roth, The
Algorithmic Foundations of Differential Privacy, 2014, appendix A; for covariances Dwork, Talwar,
Thakurta, Zhang, Analyze Gauss, 2014). docs/privacy.md states its worth.

Features must come from a model that the images themselves have not changed: that of the broadcast.
After local training every feature depends on every image, and no bound holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

Draw = Callable[[tuple[int, ...]], F64]

_TINY = np.finfo(np.float64).tiny
_SUMMED = 4  # normal numbers summed to one


def system_normal(shape: tuple[int, ...]) -> F64:
    """Draw from N(0, 1) with bits of the operating system's generator alone.

    An ordinary generator's outputs reveal its state, and with it the noise could be removed. Each
    number is the sum of four over 2, so that the lowest bits do not reveal the number (Holohan and
    Braghin, Secure Random Sampling in Differential Privacy, 2021).
    """
    size = math.prod(shape)
    total = sum((_box_muller(size) for _ in range(_SUMMED)), start=np.zeros(size))
    return (total / math.sqrt(_SUMMED)).reshape(shape)


def _box_muller(size: int) -> F64:
    """Draw ``size`` numbers from N(0, 1), two from each pair of 53-bit fractions."""
    pairs = (size + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    fractions = words.astype(np.float64) * 2.0**-53  # [0, 1)
    length = np.sqrt(-2 * np.log1p(-fractions[0]))  # log of (0, 1]
    angle = 2 * np.pi * fractions[1]
    return np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:size]


@dataclass(frozen=True)
class Statistic:
    """Tensors of an upload that are made of one noised sum over images, and of counts.

    Attributes:
        name: for people and for the ledger.
        tensors: their names in the upload.
    """

    name: str
    tensors: tuple[str, ...]


def no_statistics(_hparams: Any, _kind: str, _task: Any) -> tuple[Statistic, ...]:
    """Return nothing: the statistics of a manifest without noise."""
    return ()


@dataclass(frozen=True)
class Privacy:
    """Protection of the statistics of images in a round.

    Attributes:
        noise_multiplier: z; 0: there is no noise here. With a clip, it comes later: masked sums get
            theirs from all clients together.
        clip: C, the largest length of one image's feature in a sum; 0 without noise: any.
        draw: shape -> N(0, 1). Only tests give another one.
    """

    noise_multiplier: float = 0.0
    clip: float = 0.0
    draw: Draw = system_normal

    @property
    def on(self) -> bool:
        """True if statistics are clipped, and noised here or later."""
        return self.noise_multiplier > 0 or self.clip > 0

    def clipped(self, features: NDArray[Any]) -> NDArray[Any]:
        """Return the rows (N, d), those longer than C shortened to C; as they are when off."""
        if not self.on:
            return features
        x = features.astype(np.float64)
        lengths = np.linalg.norm(x, axis=1, keepdims=True)  # (N, 1)
        clipped: F64 = x * np.minimum(1.0, self.clip / np.maximum(lengths, _TINY))
        return clipped

    def released_sums(self, sums: F64, counts: I64) -> F64:
        """Add noise to sums of clipped features: once, since each call draws fresh noise.

        Args:
            sums: (c, d).
            counts: (c,); the row of a class without images stays zero.
        """
        if not self.on:
            return sums
        noise = self.noise_multiplier * self.clip * self.draw(sums.shape)
        return np.where((counts > 0)[:, None], sums + noise, 0.0)

    def released_scatter(self, residuals: NDArray[Any], *, diagonal: bool) -> F64:
        """Return sum r r^T of clipped rows (n, d) with noise: (d, d), or its diagonal (d,).

        Off the diagonal the noise is symmetric: only one triangle is noised, whose length is at
        most that of the matrix.
        """
        r = self.clipped(residuals)
        deviation = self.noise_multiplier * self.clip**2
        d = r.shape[1]
        if diagonal:
            squares: F64 = np.square(r).sum(axis=0)
            return squares + deviation * self.draw((d,))
        noise = np.zeros((d, d))
        upper = np.triu_indices(d)
        noise[upper] = deviation * self.draw((len(upper[0]),))
        noise += np.triu(noise, 1).T
        scatter: F64 = r.T @ r + noise
        return scatter


OFF = Privacy()
