"""Heads, and predictors that score images in micro-batches, without a gradient (torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fcil_adapters.numerics.scores import quadratic, unit_rows
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_protocol.payloads.payload import Array


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer that prefers the same classes as a head, exactly.

    Attributes:
        weight, bias: (C, d) and (C,), float32.
        scores: its outputs are the head's scores (``same``), these and a number of each image
            (``shifted``: the softmax is the same), or these times one (``scaled``).
    """

    weight: Tensor
    bias: Tensor
    scores: Literal["same", "shifted", "scaled"] = "same"

    @classmethod
    def nearest(cls, rows: Tensor) -> LinearLayer:
        """Return ``2 m f - |m|^2``, which is ``-|f - m|^2`` and |f|^2, for rows m (C, d)."""
        wide = rows.double()
        return cls((2 * wide).float(), -wide.square().sum(1).float(), "shifted")

    @classmethod
    def cosine(cls, rows: Tensor) -> LinearLayer:
        """Return the cosines with rows (C, d), times the length of the feature."""
        unit: Tensor = unit_rows(rows.double())
        return cls(unit.float(), torch.zeros(len(rows), device=rows.device), "scaled")


@dataclass(frozen=True)
class Head:
    """The last step of a composed model.

    Attributes:
        classes: candidate ids, one per column.
        score: features (b, d) -> scores (b, C).
        linear_layer: the same as a linear layer; None: it is none.
    """

    classes: tuple[int, ...]
    score: Callable[[Tensor], Tensor]
    linear_layer: LinearLayer | None = None

    @classmethod
    def linear(cls, rows: HeadRows, device: str) -> Head:
        """Return the linear head of the rows whose classes any client had."""
        rows = rows.chosen(rows.seen)
        weight, bias = to_torch(rows.weight, device), to_torch(rows.bias, device)  # (C, d), (C,)
        return cls(
            tuple(rows.classes.tolist()),
            lambda x: functional.linear(x, weight, bias),
            LinearLayer(weight, bias),
        )

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
        features: the same images -> the class token's features (b, d) that the head gets; None: it
            gets others.
        linear_layer: the head as a linear layer of these; None: it is none.
    """

    classes: tuple[int, ...]
    score: Callable[[Tensor], Tensor]
    micro_batch: int | None
    features: Callable[[Tensor], Tensor] | None = None
    linear_layer: LinearLayer | None = None

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C)."""
        with torch.no_grad():
            parts = torch.split(to_torch(images), self.micro_batch or max(len(images), 1))
            return np.concatenate([to_numpy(self.score(part)) for part in parts])
