"""A teacher made of a backbone's own blocks: what its class token leaves out.

A backbone trained on few classes knows more in its blocks than its last class token says: ten
classes need few directions. The teacher's answer to a picture is a point of d numbers made of
several blocks: class tokens and means of patches side by side, their main directions (PCA on
the pre-training pictures), each divided by the root of its spread, so that few strong
directions do not outweigh the others. The basis is turned so that it lies nearest to the
backbone's features (Procrustes), from where the student starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

# Blocks, counted from 1, whose class token or whose mean of patches is taken, beside the feature:
# chosen on CIFAR-100 training images of 50 classes (docs/backbone.md).
CLASS_TOKENS, PATCH_MEANS = (5,), (2,)


def depths(vit: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what the teacher is made of, (B, d) each, for normalised images; the feature last."""
    tokens = vit._pos_embed(vit.patch_embed(x))  # noqa: SLF001
    found = []
    for number, block in enumerate(vit.blocks, start=1):
        tokens = block(tokens)
        if number in CLASS_TOKENS:
            found.append(tokens[:, 0])
        if number in PATCH_MEANS:
            found.append(tokens[:, 1:].mean(1))
    return [t.float() for t in (*found, vit.norm(tokens)[:, 0])]


class LayersTeacher(nn.Module):
    """The frozen map from `depths` to the answer (B, d)."""

    def __init__(self, parts: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(parts * dim))
        self.register_buffer("map", torch.zeros(parts * dim, dim))

    def fit(self, seen: Sequence[Tensor]) -> None:
        """Choose mean and map from `depths` of many pictures."""
        d = seen[-1].shape[1]
        spans = [(s - s.mean(0)).square().sum(1).mean().sqrt().double() for s in seen]
        scale = torch.cat([torch.full((d,), 1.0, dtype=torch.float64) / s for s in spans])
        x = torch.cat(list(seen), 1).double() * scale
        mean = x.mean(0)
        _, spread, rows = torch.linalg.svd(x - mean, full_matrices=False)
        base = rows[:d].T * (spread[:d] / len(x) ** 0.5) ** -0.5
        left, _, right = torch.linalg.svd(((x - mean) @ base).T @ seen[-1].double())
        self.mean.copy_(mean / scale)
        self.map.copy_(scale[:, None] * (base @ left @ right))

    def forward(self, seen: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(seen), 1) - self.mean) @ self.map


def layers_loss(student: Tensor, answers: Tensor) -> Tensor:
    """Return the mean of 1 - cosine; both (B, d)."""
    return (1 - functional.cosine_similarity(student, answers, dim=1)).mean()
