"""Gaussians against numpy's covariance: forms, transport, samples, few images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcil_adapters.toolkit.gaussians import batches
from fcil_adapters.toolkit.gaussians.batches import (
    pooled_covariances,
    sample_gaussians,
    square_roots,
    unpack_gaussians,
)
from fcil_adapters.toolkit.gaussians.gaussian import (
    Gaussian,
    describe,
    factor_rows,
    gaussian_faults,
    is_triangle,
    pack_gaussians,
    store_gaussians,
    stored_gaussians,
)
from fcil_protocol.payloads.payload import Payload

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

    def test_the_rest_is_never_negative_where_the_factor_takes_all(self):
        """By rounding, what is left of a covariance of rank 3 falls below zero now and then."""
        for seed in range(20):
            x = features(30, seed)[:, :3] @ features(3, seed, D)
            rest = describe(x, "lowrank", 3).rest
            assert rest.min() >= 0
            np.testing.assert_allclose(rest, 0, atol=1e-9)

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


def roots(*covariances):
    return square_roots(torch.tensor(np.stack(covariances)))


class TestSquareRoots:
    def test_work_where_cholesky_does_not_all_at_once(self):
        many = [covariance(features(n, d=20)) for n in (2, 5, 400)]
        for n, S, F in zip((2, 5, 400), many, roots(*many), strict=True):
            np.testing.assert_allclose(F.T @ F, S, atol=1e-5 * np.abs(S).max())
            assert len(F) == min(n - 1, 20)

    def test_of_zero_and_of_something_negative_have_no_rows(self):
        assert [F.shape for F in roots(np.zeros((4, 4)), -np.eye(4))] == [(0, 4)] * 2

    def test_ignore_an_asymmetry(self):
        S = covariance(features(30))
        twisted = S + np.triu(np.ones_like(S), 1) - np.tril(np.ones_like(S), -1)
        (F,) = roots(twisted)
        np.testing.assert_allclose(F.T @ F, S, atol=1e-5 * np.abs(S).max())


def draw(gaussians, counts, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sample_gaussians(gaussians, np.array(counts), scale, generator).numpy()


class TestSamples:
    @pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
    def test_have_their_means_and_scaled_covariances_in_order(self, form):
        """Gaussians of different heights and numbers of samples, one of them with none."""
        sets = [features(n, seed=n) for n in (40, 7, 5, 40)]
        counts = (100_000, 0, 90_000, 20_000)
        h = draw([describe(x, form, 3) for x in sets], counts)
        assert h.dtype == np.float32
        for x, own in zip(
            sets, np.split(h.astype(np.float64), np.cumsum(counts)[:-1]), strict=True
        ):
            if len(own):
                S = 3 * by_definition(x, form, 3)
                size = np.abs(S).max()
                near = {"atol": 0.03 * np.sqrt(size), "rtol": 0}
                np.testing.assert_allclose(own.mean(0), x.mean(0), **near)
                np.testing.assert_allclose(np.cov(own, rowvar=False), S, atol=0.03 * size)

    def test_of_different_gaussians_and_of_one_are_independent(self):
        g = describe(features(40), "lowrank", 3)
        h = draw([g, g], [20_000, 20_000])
        pairs = [(h[:20_000], h[20_000:]), (h[:20_000:2], h[1:20_000:2])]
        for one, other in pairs:
            both = np.corrcoef(one, other, rowvar=False)[:D, D:]
            assert np.abs(both).max() < 0.06

    def test_of_a_single_image_are_that_image(self):
        x = features(1)
        h = draw([describe(x, "lowrank", 3)], [5])
        np.testing.assert_allclose(h, np.repeat(x, 5, 0), rtol=1e-6)

    def test_come_from_their_generator_alone(self):
        many = [describe(features(n), "lowrank", 3) for n in COUNTS]
        counts = [3, 0, 1, 9, 2, 5]
        np.testing.assert_array_equal(draw(many, counts), draw(many, counts))
        assert np.abs(draw(many, counts) - draw(many, counts, seed=1)).max() > 0.1

    def test_need_few_operations_and_little_memory(self, monkeypatch):
        """A thousand Gaussians of alike sizes are a handful of products, none of them large."""
        products = []
        original = batches._padded

        def watch(factors, device):
            products.append(len(factors))
            return original(factors, device)

        monkeypatch.setattr(batches, "_padded", watch)
        many = [describe(features(n), "lowrank", 3) for n in (4, 9, 12, 30)] * 250
        counts = np.random.default_rng(0).integers(0, 40, len(many))
        whole = draw(many, counts)
        assert sum(products) == np.count_nonzero(counts)
        assert len(products) <= 6
        monkeypatch.setattr(batches, "_SAMPLE_NUMBERS", 20_000)
        assert draw(many, counts).shape == whole.shape
        assert max(n * 32 * D for n in products[6:]) <= 2 * 20_000


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_pooling_is_the_count_weighted_average_of_each_group(form):
    groups = [[describe(features(n, seed=s), form, 3) for s, n in enumerate(counts)]
              for counts in ((3, 12, 30), (4, 4), (9, 9, 9, 9, 9))]  # fmt: skip
    for group, (factor, rest) in zip(groups, pooled_covariances(groups), strict=True):
        expected = sum(g.count * g.covariance() for g in group) / sum(g.count for g in group)
        got = factor.astype(np.float64).T @ factor + np.diag(rest)
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
        assert len(factor) <= D
    assert pooled_covariances([]) == []


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_the_servers_store_keeps_every_form(form):
    many = [describe(features(n), form, 3) for n in COUNTS]
    for one, other in zip(many, stored_gaussians(store_gaussians(many, D)), strict=True):
        np.testing.assert_allclose(other.covariance(), one.covariance(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other.mean, one.mean, rtol=1e-6, atol=1e-6)
        assert other.count == one.count
    assert stored_gaussians(store_gaussians([], D)) == []


def widened(gaussian):
    wide = (a.astype(np.float64) for a in (gaussian.mean, gaussian.factor, gaussian.rest))
    return Gaussian(gaussian.count, *wide)


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_what_travelled_is_kept_in_float32_and_used_in_float64(form):
    """A server holds the Gaussians of all clients and classes; copies would be twice as large."""
    many = travelled([describe(features(n), form, 3) for n in COUNTS[1:]], form, 3)
    wide = [widened(g) for g in many]
    for g, w in zip(many, wide, strict=True):
        assert {a.dtype for a in (g.mean, g.factor, g.rest)} == {np.dtype(np.float32)}
        np.testing.assert_array_equal(draw([g], [4]), draw([w], [4]))
        np.testing.assert_allclose(g.covariance(), w.covariance(), rtol=1e-13, atol=1e-13)
    (ours,), (theirs,) = pooled_covariances([many]), pooled_covariances([wide])
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_servers_store_is_read_without_copies():
    tensors = store_gaussians([describe(features(n), "lowrank", 3) for n in COUNTS], D)
    for g in stored_gaussians(tensors):
        assert np.shares_memory(g.mean, tensors["mean"])
        assert g.factor.size == 0 or np.shares_memory(g.factor, tensors["factor"])
