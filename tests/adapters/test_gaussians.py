"""Gaussians against numpy's covariance: forms, transport, samples, few images."""

from __future__ import annotations

import numpy as np
import pytest

from fcil_adapters.gaussians import (
    describe,
    factor_rows,
    gaussian_faults,
    is_triangle,
    pack_gaussians,
    pooled_covariance,
    sample_gaussian,
    square_root,
    store_gaussians,
    stored_gaussians,
    unpack_gaussians,
)
from fcil_protocol.payload import Payload

D = 9
COUNTS = (1, 2, 5, 6, 7, 30)  # d = 9: a factor up to 5 rows (6 images), a triangle beyond


def features(n: int, seed: int = 0, d: int = D):
    rng = np.random.default_rng([n, seed])
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)


def covariance(x):
    return np.cov(x, rowvar=False) if len(x) > 1 else np.zeros((x.shape[1],) * 2)


def by_definition(x, form, q):
    """What is left of the covariance in each form."""
    S = covariance(x)
    if form == "full":
        return S
    if form == "diag":
        return np.diag(np.diag(S))
    values, U = np.linalg.eigh(S)
    low = U[:, -q:] @ np.diag(values[-q:]) @ U[:, -q:].T
    return low + np.diag(np.maximum(np.diag(S) - np.diag(low), 0))


def travelled(gaussians, form, q, d=D):
    payload = Payload(pack_gaussians(gaussians, d, form))
    counts = [g.count for g in gaussians]
    assert gaussian_faults(payload, counts, form, q) == []
    return unpack_gaussians(payload, counts, form, q)


class TestForms:
    @pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
    @pytest.mark.parametrize("n", COUNTS)
    def test_hold_the_unbiased_covariance(self, form, n):
        x = features(n)
        g = describe(x, form, 3)
        np.testing.assert_allclose(g.mean, x.mean(0), atol=1e-12)
        np.testing.assert_allclose(g.covariance(), by_definition(x, form, 3), atol=1e-9)
        assert g.count == n

    @pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
    def test_survive_the_transport_in_float32(self, form):
        gaussians = [describe(features(n), form, 3) for n in COUNTS]
        for sent, got in zip(gaussians, travelled(gaussians, form, 3), strict=True):
            np.testing.assert_allclose(got.mean, sent.mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got.covariance(), sent.covariance(), rtol=1e-4, atol=1e-4)

    def test_a_low_rank_that_covers_all_images_is_exact(self):
        x = features(4)
        g = describe(x, "lowrank", 16)
        assert g.factor.shape == (3, D)
        assert not g.rest.any()
        np.testing.assert_allclose(g.covariance(), covariance(x), atol=1e-10)

    def test_no_factor_row_is_an_images_feature(self):
        x = features(3)
        centred = (x - x.mean(0)) / np.sqrt(2)
        F = describe(x, "full", 1).factor
        for row in F:
            assert np.linalg.norm(centred - row, axis=1).min() > 1e-2

    def test_full_sends_whichever_is_smaller(self):
        for n in range(1, 40):
            numbers = (n - 1) * D
            assert is_triangle(n, D, "full") == (numbers > D * (D + 1) // 2)
            tensors = pack_gaussians([describe(features(n), "full", 1)], D, "full")
            assert sum(a.size for a in tensors.values()) - D == min(numbers, D * (D + 1) // 2)

    def test_low_rank_costs_q_plus_one_rows(self):
        tensors = pack_gaussians([describe(features(30), "lowrank", 3)], D, "lowrank")
        assert {n: a.shape for n, a in tensors.items()} == {
            "gauss.mean": (1, D), "gauss.rest": (1, D), "gauss.factor": (3, D),
        }  # fmt: skip

    @pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
    def test_no_classes(self, form):
        assert travelled([], form, 3) == []

    def test_row_counts_follow_from_image_counts(self):
        assert [factor_rows(n, D, "lowrank", 3) for n in (1, 2, 4, 9)] == [0, 1, 3, 3]
        assert [factor_rows(n, D, "full", 3) for n in (1, 6, 7)] == [0, 5, 0]
        assert factor_rows(50, D, "diag", 3) == 0


class TestFaults:
    def test_missing_rows_and_negative_variances_are_named(self):
        tensors = pack_gaussians([describe(features(6), "lowrank", 3)], D, "lowrank")
        short = Payload({**tensors, "gauss.factor": tensors["gauss.factor"][:2]})
        assert gaussian_faults(short, [6], "lowrank", 3) == [
            "'gauss.factor': the counts ask for 3 rows, got 2"
        ]
        negative = Payload({**tensors, "gauss.rest": tensors["gauss.rest"] - 100})
        assert gaussian_faults(negative, [6], "lowrank", 3) == [
            "'gauss.rest' holds a negative variance"
        ]

    def test_a_missing_triangle_is_named(self):
        tensors = pack_gaussians([describe(features(30), "full", 3)], D, "full")
        other = Payload({**tensors, "gauss.triangle": tensors["gauss.triangle"][:0]})
        assert gaussian_faults(other, [30], "full", 3) == [
            "'gauss.triangle': the counts ask for 1 rows, got 0"
        ]

    def test_a_triangle_that_is_no_covariance_is_clipped(self):
        """A client may send anything; the server never draws a NaN."""
        S = np.diag([2.0, -1.0, 0.5])
        tensors = {
            "gauss.mean": np.zeros((1, 3), np.float32),
            "gauss.factor": np.zeros((0, 3), np.float32),
            "gauss.triangle": S[np.triu_indices(3)][None].astype(np.float32),
        }
        (g,) = unpack_gaussians(Payload(tensors), [30], "full", 1)
        np.testing.assert_allclose(g.covariance(), np.diag([2, 0, 0.5]), atol=1e-7)


class TestSquareRoot:
    @pytest.mark.parametrize("n", [2, 5, 400])
    def test_works_where_cholesky_does_not(self, n):
        S = covariance(features(n, d=20))
        F = square_root(S)
        np.testing.assert_allclose(F.T @ F, S, atol=1e-9)
        assert len(F) == min(n - 1, 20)

    def test_of_zero_and_of_something_negative_has_no_rows(self):
        assert square_root(np.zeros((4, 4))).shape == (0, 4)
        assert square_root(-np.eye(4)).shape == (0, 4)

    def test_ignores_an_asymmetry(self):
        S = covariance(features(30))
        twisted = S + np.triu(np.ones_like(S), 1) - np.tril(np.ones_like(S), -1)
        F = square_root(twisted)
        np.testing.assert_allclose(F.T @ F, S, atol=1e-9)


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_samples_have_the_mean_and_the_scaled_covariance(form):
    x = features(40)
    g = describe(x, form, 3)
    h = sample_gaussian(g, 200_000, 3.0, np.random.default_rng(0))
    S = 3 * by_definition(x, form, 3)
    tolerance = 0.02 * np.abs(S).max()
    np.testing.assert_allclose(h.mean(0), x.mean(0), atol=0.02 * np.sqrt(np.abs(S).max()))
    np.testing.assert_allclose(np.cov(h, rowvar=False), S, atol=tolerance)


def test_samples_of_a_single_image_are_that_image():
    x = features(1)
    h = sample_gaussian(describe(x, "lowrank", 3), 5, 3.0, np.random.default_rng(0))
    np.testing.assert_allclose(h, np.repeat(x, 5, 0))


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_pooling_is_the_count_weighted_average(form):
    many = [describe(features(n), form, 3) for n in (3, 12, 30)]
    factor, rest = pooled_covariance(many)
    expected = sum(g.count * g.covariance() for g in many) / 45
    np.testing.assert_allclose(factor.T @ factor + np.diag(rest), expected, atol=1e-9)
    assert len(factor) <= D


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_the_servers_store_keeps_every_form(form):
    many = [describe(features(n), form, 3) for n in COUNTS]
    for one, other in zip(many, stored_gaussians(store_gaussians(many, D)), strict=True):
        np.testing.assert_allclose(other.covariance(), one.covariance(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other.mean, one.mean, rtol=1e-6, atol=1e-6)
        assert other.count == one.count
    assert stored_gaussians(store_gaussians([], D)) == []
