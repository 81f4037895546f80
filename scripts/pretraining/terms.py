"""The terms of the loss, and DINO's teacher.

DINO: Caron et al., Emerging properties in self-supervised vision transformers, ICCV 2021,
https://arxiv.org/abs/2104.14294. Spread: Zbontar et al., Barlow Twins, ICML 2021,
https://arxiv.org/abs/2103.03230, on the features themselves and without centring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

_HIDDEN, _BOTTLENECK = 512, 64
_OFF_DIAGONAL = 5e-3  # Barlow Twins, section 3.1


class DinoHead(nn.Module):
    """Features (B, d) -> outputs (B, K): MLP, unit length, rows of unit length (section 3.1)."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _BOTTLENECK)
        )
        self.rows = nn.Parameter(torch.randn(outputs, _BOTTLENECK))

    def forward(self, features: Tensor) -> Tensor:
        points = functional.normalize(self.mlp(features), dim=1)
        return points @ functional.normalize(self.rows, dim=1).T


def dino_loss(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    centre: Tensor,
    temperatures: tuple[float, float],
) -> Tensor:
    """Return DINO's loss (equation 3): cross-entropy over all pairs of different views.

    Args:
        student: outputs (B, K) of each view; the teacher's views come first, in its order.
        teacher: outputs (B, K) of the large views.
        centre: (K,), taken off the teacher's outputs.
        temperatures: the student's and the teacher's.
    """
    targets = [torch.softmax((t - centre) / temperatures[1], dim=1) for t in teacher]
    logs = [torch.log_softmax(s / temperatures[0], dim=1) for s in student]
    pairs = [
        -(target * log).sum(1).mean()
        for i, target in enumerate(targets)
        for j, log in enumerate(logs)
        if i != j
    ]
    return torch.stack(pairs).mean()


def moved_centre(centre: Tensor, teacher: Sequence[Tensor], momentum: float) -> Tensor:
    """Return the centre after a batch (equation 4): a moving mean of the teacher's outputs."""
    return centre * momentum + torch.cat(list(teacher)).mean(0) * (1 - momentum)


def follow(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """Move the teacher's weights towards the student's (section 3.1)."""
    with torch.no_grad():
        for old, new in zip(teacher, student, strict=True):
            old.mul_(momentum).add_(new, alpha=1 - momentum)


def class_loss(scores: Iterable[Tensor], labels: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy of the large views' scores (B, C)."""
    losses = [functional.cross_entropy(s, labels, label_smoothing=smoothing) for s in scores]
    return torch.stack(losses).mean()


def spread_loss(first: Tensor, second: Tensor) -> Tensor:
    """Draw two views (B, d) of an image together and the d directions of the features apart.

    The features are scaled to the length sqrt(d) and not centred: so their mean, too, becomes
    small beside their spread, which is what a nearest mean by cosine needs.
    """
    d = first.shape[1]
    z1, z2 = (functional.normalize(f, dim=1) * d**0.5 for f in (first, second))
    c = z1.T @ z2 / len(first)  # (d, d)
    on = (1 - c.diagonal()).square().sum()
    return on + _OFF_DIAGONAL * (c.square().sum() - c.diagonal().square().sum())
