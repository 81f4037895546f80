"""The terms of PILoRA's objective that concern LoRA (equations 7 and 15, and the code's l1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def orthogonality(past: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Tensor:
    """Return l_ort: the sum of all absolute entries of A_i A_t^T over past tasks i (Eq. 7).

    Args:
        past: ``<block>.<projection>`` -> the stacked A's of all past tasks, (t r, d).
        current: ``<block>.<projection>`` -> A_t (r, d).
    """
    return _total((past[name] @ A.T).abs().sum() for name, A in current.items())


def l1_norm(current: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of all absolute entries of the current A's (published code only)."""
    return _total(A.abs().sum() for A in current.values())


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()
