"""Scores of features, written once for numpy's arrays and torch's tensors.

They use only operators, and methods that both have, with numpy's names (``axis``, ``keepdims``).
They never read the number of rows: an exported graph takes any number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TINY = float(np.finfo(np.float32).tiny)

Rows = Any  # an array or a tensor, (B, d)


def unit_rows(rows: Rows) -> Rows:
    """Return rows of length 1; zero stays."""
    return rows / ((rows * rows).sum(axis=1, keepdims=True) ** 0.5).clip(_TINY)


def linear(rows: Rows, weight: Any, bias: Any) -> Rows:
    """Return ``W x + b`` for weight (C, d) and bias (C,): (B, C)."""
    return rows @ weight.T + bias


def quadratic(rows: Rows, weight: Any, bias: Any, turn: Any, offset: Any) -> Rows:
    """Return ``W x + b + |T_c x - t_c|^2 / 2`` for turn (C, r, d) and offset (C, r): (B, C)."""
    bent = ((turn @ rows.T - offset[:, :, None]) ** 2).sum(axis=1)  # (C, B)
    return linear(rows, weight, bias) + bent.T / 2


def cosines(rows: Rows, others: Any) -> Rows:
    """Return the cosines between rows (B, d) and others (C, d): (B, C)."""
    return unit_rows(rows) @ unit_rows(others).T


def negative_distances(rows: Rows, others: Any) -> Rows:
    """Return the negative squared distances between rows (B, d) and others (C, d): (B, C)."""
    squares = (rows * rows).sum(axis=1, keepdims=True) + (others * others).sum(axis=1)  # (B, C)
    return 2 * rows @ others.T - squares
