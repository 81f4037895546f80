"""First values of prompts and keys, drawn by the server (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.toolkit.prompts.options import PoolHparams
from fcil_adapters.toolkit.prompts.parts import pool_names

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# Directions whose length is below this share of the longest are rounding errors.
_FLAT = 1e-6


def draw_uniform_pools(rng: np.random.Generator, h: PoolHparams, d: int) -> dict[str, F32]:
    """Draw the pools of all blocks, prompts and keys of width d, from U[0, 1)."""
    shapes = {"prompt": (h.pool_size, h.prompt_length, d), "key": (h.pool_size, d)}
    return {
        name: rng.random(shapes[name.partition(".")[0]], dtype=np.float32)
        for name in pool_names(h.blocks)
    }


def draw_pool(rng: np.random.Generator, shape: Sequence[int], past: Sequence[NDArray[Any]]) -> F32:
    """Draw M random unit vectors, orthogonal to each other and to those of past tasks.

    Like the initial components of CODA-Prompt: past prompts keep their directions to themselves.

    Args:
        rng: the source.
        shape: (M, ...); each row is one vector, flattened.
        past: arrays (m, ...) of past tasks.
    """
    M, width = shape[0], int(np.prod(shape[1:]))
    before = [p.reshape(len(p), width).astype(np.float64) for p in past]
    fresh = rng.standard_normal((M, width))
    return orthonormal_rows(fresh, before).reshape(tuple(shape)).astype(np.float32)


def orthonormal_rows(fresh: F64, past: Sequence[F64]) -> F64:
    """Make rows (M, D) orthonormal, and orthogonal to past rows while D leaves room for it.

    Once the past and the rows so far fill all D dimensions, a new set begins, orthogonal in
    itself only.
    """
    M, D = fresh.shape
    basis = _basis(np.concatenate([np.zeros((0, D)), *past]))  # (r, D)
    done = np.zeros((0, D))
    while len(done) < M:
        if len(basis) == D:
            basis = basis[:0]
        chunk = fresh[len(done) : len(done) + D - len(basis)]
        # Twice: the second removes the rounding errors that the first projection leaves.
        for _ in range(2):
            chunk = chunk - chunk @ basis.T @ basis
        rows = np.linalg.qr(chunk.T)[0].T  # (chunk, D)
        basis = np.concatenate([basis, rows])
        done = np.concatenate([done, rows])
    return done


def _basis(rows: F64) -> F64:
    """Return an orthonormal basis (r, D) of the rows' span."""
    if not len(rows):
        return rows
    _, lengths, directions = np.linalg.svd(rows, full_matrices=False)
    basis: F64 = directions[lengths > _FLAT * lengths[0]]
    return basis
