"""Heads, and predictors that score images in micro-batches, without a gradient (torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fcil_adapters.numerics.scores import quadratic
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_protocol.payloads.payload import Array


@dataclass(frozen=True)
class Head:
    """The last step of a composed model.

    Attributes:
        classes: candidate ids, one per column.
        score: features (b, d) -> scores (b, C).
    """

    classes: tuple[int, ...]
    score: Callable[[Tensor], Tensor]

    @classmethod
    def linear(cls, rows: HeadRows, device: str) -> Head:
        """Return the linear head of the rows whose classes any client had."""
        rows = rows.chosen(rows.seen)
        weight, bias = to_torch(rows.weight, device), to_torch(rows.bias, device)  # (C, d), (C,)
        return cls(tuple(rows.classes.tolist()), lambda x: functional.linear(x, weight, bias))

    @classmethod
    def quadratic(cls, tensors: Mapping[str, Array], device: str) -> Head:
        """Return a quadratic head (`numerics.scores.quadratic`) of the described classes."""
        weights = [to_torch(tensors[n], device) for n in ("weight", "bias", "turn", "offset")]
        classes = tuple(int(c) for c in tensors["classes"])
        return cls(classes, lambda x: quadratic(x, *weights))


@dataclass(frozen=True)
class Scorer:
    """A composed model (`contract.Predictor`).

    Attributes:
        classes: candidate ids, one per column.
        score: images (b, S, S, 3), uint8 -> scores (b, C).
        micro_batch: largest b; None: all images at once.
    """

    classes: tuple[int, ...]
    score: Callable[[Tensor], Tensor]
    micro_batch: int | None

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self.micro_batch or max(len(images), 1))
            return np.concatenate([to_numpy(self.score(part)) for part in parts])
