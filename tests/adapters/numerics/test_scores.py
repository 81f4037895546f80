"""Scores that are written once: numpy's arrays and torch's tensors give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcil_adapters.methods.running_mean.model import score as nearest_thumbnail
from fcil_adapters.methods.running_mean.thumbnails import area_weights
from fcil_adapters.numerics.scores import cosines, linear, negative_distances, quadratic, unit_rows
from fcil_adapters.toolkit.closed_form.model import score_both, score_linear, score_projected

RNG = np.random.default_rng(3)
ROWS = np.vstack([RNG.normal(size=(4, 6)), np.zeros((1, 6))])  # one of length 0
POINTS = RNG.normal(size=(3, 6))
BIAS = RNG.normal(size=3)
PIXELS = RNG.integers(0, 256, (2, 10, 10, 3)).astype(np.float64)


@pytest.mark.parametrize(
    ("score", "arguments"),
    [
        (unit_rows, (ROWS,)),
        (cosines, (ROWS, POINTS)),
        (negative_distances, (ROWS, POINTS)),
        (quadratic, (ROWS, POINTS, BIAS, RNG.normal(size=(3, 2, 6)), RNG.normal(size=(3, 2)))),
        (linear, (ROWS, POINTS, RNG.normal(size=3))),
        (score_linear, (ROWS, POINTS, BIAS)),
        (score_projected, (ROWS, RNG.normal(size=(3, 9)), BIAS, RNG.normal(size=(6, 9)))),
        (score_both, (ROWS, RNG.normal(size=(3, 15)), BIAS, RNG.normal(size=(6, 9)))),
        (nearest_thumbnail, (PIXELS, area_weights(10, 4), RNG.random((3, 16)))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_numpy_and_torch_agree(score, arguments):
    here = score(*arguments)
    there = score(*(torch.tensor(a) for a in arguments))
    assert np.isfinite(here).all()
    np.testing.assert_allclose(there.numpy(), here, rtol=1e-12, atol=1e-12)
