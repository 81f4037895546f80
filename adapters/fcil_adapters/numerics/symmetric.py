"""Sums of products x x^T: as upper triangles, and as factors of few rows (torch-free)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def triangle_size(width: int) -> int:
    """Return the number of entries of an upper triangle with its diagonal."""
    return width * (width + 1) // 2


def pack_triangle(square: F64) -> F64:
    """Return the upper triangle of a symmetric matrix (D, D), row after row."""
    return np.concatenate([square[i, i:] for i in range(len(square))])


def unpack_triangle(triangle: F64, width: int) -> F64:
    """Return the symmetric matrix (D, D) of an upper triangle."""
    square = np.zeros((width, width))
    start = 0
    for i in range(width):
        square[i, i:] = triangle[start : start + width - i]
        start += width - i
    whole: F64 = square + np.triu(square, 1).T
    return whole


def leading_factor(rows: F64, most: int) -> F64:
    """Return F (r, D), r <= most, F^T F the best approximation of rows^T rows of that rank.

    The rows are turned by the eigenvectors of their own products: the sum of squares stays exact,
    and no row remains one of those given.

    Args:
        rows: (n, D); exact for n <= most.
        most: the largest r.
    """
    _, turn = np.linalg.eigh(rows @ rows.T)  # ascending
    turned: F64 = turn[:, ::-1][:, :most].T @ rows
    return turned


def leading_factor_of(square: F64, most: int) -> F64:
    """Return the same factor for a symmetric matrix (D, D); negative eigenvalues count as zero."""
    values, vectors = np.linalg.eigh(square)  # ascending
    lengths = np.sqrt(np.maximum(values[::-1][:most], 0))
    factor: F64 = lengths[:, None] * vectors[:, ::-1][:, :most].T
    return factor
