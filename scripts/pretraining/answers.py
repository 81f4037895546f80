"""The answers that a student predicts as its feature, made of a teacher's numbers.

The teacher is a larger backbone (`targets`), or the blocks of the backbone from which the student
starts: trained on few classes, they know more than its last class token says, since ten classes
need few directions.

An answer is a point of the student's width: the teacher's numbers side by side, centred, in their
main directions (PCA on pre-training pictures), each divided by a power of its spread, so that few
strong directions do not outweigh the others. The basis is turned so that it lies nearest to the
features from which the student starts (Procrustes). So no head stands between answer and feature:
cosines between the student's features become those between answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

# Blocks, counted from 1, whose class token or whose mean of patches is taken, beside the feature:
# chosen on CIFAR-100 training images of 50 classes (docs/backbone.md).
CLASS_TOKENS, PATCH_MEANS = (5,), (2,)
_LEAST = 1e-6  # of the largest spread: less is rounding


def depths(vit: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the numbers of a backbone's blocks, (B, d) each, for normalised images.

    The feature is the last.
    """
    tokens = vit._pos_embed(vit.patch_embed(x))  # noqa: SLF001
    found = []
    for number, block in enumerate(vit.blocks, start=1):
        tokens = block(tokens)
        if number in CLASS_TOKENS:
            found.append(tokens[:, 0])
        if number in PATCH_MEANS:
            found.append(tokens[:, 1:].mean(1))
    return [t.float() for t in (*found, vit.norm(tokens)[:, 0])]


class Answers(nn.Module):
    """The frozen map from a teacher's numbers, D in all, to the answer (B, d)."""

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("map", torch.zeros(inputs, dim))

    def fit(self, seen: Sequence[Tensor], features: Tensor, most: int, whiten: float) -> None:
        """Choose mean and map.

        Args:
            seen: the parts of the teacher's numbers of many pictures, (N, D_i) each.
            features: of a student before its first step, (N, d).
            most: of the main directions.
            whiten: the power of its spread by which each direction is divided.
        """
        spans = [(s - s.mean(0)).square().sum(1).mean().sqrt().double() for s in seen]
        scale = torch.cat(
            [
                torch.full((s.shape[1],), 1.0, dtype=torch.float64, device=s.device) / span
                for s, span in zip(seen, spans, strict=True)
            ]
        )
        x = torch.cat(list(seen), 1).double() * scale
        mean = x.mean(0)
        _, spread, rows = torch.linalg.svd(x - mean, full_matrices=False)
        spread = spread[:most].clamp(min=float(_LEAST * spread[0]))
        base = rows[:most].T * (spread / len(x) ** 0.5) ** -whiten
        left, _, right = torch.linalg.svd(
            ((x - mean) @ base).T @ features.double(), full_matrices=False
        )
        self.mean.copy_(mean / scale)
        self.map.copy_(scale[:, None] * (base @ left @ right))

    def forward(self, seen: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(seen), 1) - self.mean) @ self.map


def answers_loss(student: Tensor, answers: Tensor) -> Tensor:
    """Return the mean of 1 - cosine; both (B, d)."""
    return (1 - functional.cosine_similarity(student, answers, dim=1)).mean()
