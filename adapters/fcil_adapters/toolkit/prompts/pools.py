"""Prompts of each block for given queries, and the transformer that takes them (torch).

Three kinds: one pool for all tasks (HePCo), pools to which each task adds (HGP), and components
with attention over the query's features (CODA-Prompt: Smith et al., CVPR 2023,
https://arxiv.org/abs/2211.13218).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.prompts.prefix import PromptedView, select

Tensors = Mapping[str, Tensor]
Choose = Callable[[Tensor], Mapping[int, Tensor]]  # queries (b, d) -> block -> prompts (b, L, d)

_SMALLEST = 1e-12  # as functional.normalize


class Prompted:
    """A view of a backbone whose blocks take the prompts that a query chooses.

    Args:
        backbone: with the method's preparation of pixels (`with_pixels`).
        blocks: indices of the blocks that take prompts.
    """

    def __init__(self, backbone: Backbone, blocks: Iterable[int]) -> None:
        self._backbone = backbone
        self._view = PromptedView(backbone, blocks)

    def features(self, choose: Choose) -> Callable[[Tensor, Tensor], Tensor]:
        """Return (pixels (b, S, S, 3) in [0, 255], queries (b, d)) -> features (b, d)."""

        def prompted(pixels: Tensor, queries: Tensor) -> Tensor:
            return self._view.forward(self._backbone.normalise(pixels), choose(queries))

        return prompted


def from_pools(pools: Tensors, blocks: Iterable[int]) -> Choose:
    """Mix each block's entire pool: ``key.<block>`` (M, d) and ``prompt.<block>`` (M, L, d)."""
    wanted = tuple(blocks)

    def choose(queries: Tensor) -> dict[int, Tensor]:
        return {b: select(queries, pools[f"key.{b}"], pools[f"prompt.{b}"]) for b in wanted}

    return choose


@dataclass(frozen=True)
class TaskPrompts:
    """Tensors to which each task adds rows: past ones fixed, the last one's trainable.

    Attributes:
        past: name -> (t m, ...); empty in the first task.
        current: name -> the last task's parameters (m, ...).
    """

    past: Tensors
    current: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, tasks: Sequence[Mapping[str, NDArray[Any]]], device: str) -> TaskPrompts:
        """Copy the tasks' tensors to a device; the last task's can be trained."""
        *past, current = tasks
        return cls(
            {n: torch.cat([to_torch(task[n], device) for task in past]) for n in current if past},
            {n: nn.Parameter(to_torch(array, device)) for n, array in current.items()},
        )

    @property
    def whole(self) -> dict[str, Tensor]:
        """The rows of all tasks by name, (T m, ...)."""
        return {
            n: torch.cat([self.past[n], own]) if n in self.past else own
            for n, own in self.current.items()
        }


def component_weights(queries: Tensor, keys: Tensor, attention: Tensor) -> Tensor:
    """Return ``alpha_m = cos(q * A_m, K_m)`` for queries (b, d): (b, m) (CODA-Prompt, Eq. 6).

    By two matrix products, without a tensor (b, m, d).

    Args:
        queries: (b, d).
        keys: K, (m, d).
        attention: A, (m, d).
    """
    products = queries @ (attention * functional.normalize(keys, dim=-1)).mT  # (b, m)
    lengths = (queries.square() @ attention.square().mT).clamp_min(_SMALLEST**2).sqrt()
    return products / lengths.clamp_min(_SMALLEST)


def from_components(tensors: Callable[[], Tensors], blocks: Iterable[int]) -> Choose:
    """Sum components by their weights: ``P* = sum_m alpha_m P_m`` (CODA-Prompt, Eq. 3).

    Args:
        tensors: ``key.<block>``, ``key.<block>.attention`` (m, d), ``prompt.<block>`` (m, L, d);
            called in each pass, since the last task's change.
        blocks: indices of the blocks that take prompts.
    """
    wanted = tuple(blocks)

    def choose(queries: Tensor) -> dict[int, Tensor]:
        now = tensors()
        chosen = {}
        for b in wanted:
            prompt = now[f"prompt.{b}"]
            alpha = component_weights(queries, now[f"key.{b}"], now[f"key.{b}.attention"])
            chosen[b] = (alpha @ prompt.flatten(1)).reshape(-1, *prompt.shape[1:])  # (b, L, d)
        return chosen

    return choose


def orthogonality(tensors: Tensors) -> Tensor:
    """Return ``sum over tensors of mean((X X^T - I)^2)``, rows flattened (CODA-Prompt, Eq. 7)."""
    total = torch.zeros(())
    for rows in tensors.values():
        x = rows.flatten(1)  # (m, L d)
        gap = x @ x.mT - torch.eye(len(x), device=x.device)
        total = total.to(x.device) + gap.square().mean()
    return total
