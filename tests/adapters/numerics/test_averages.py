"""Weights and averages over clients against loops that follow their definition."""

from __future__ import annotations

import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch

from adapters.kit import client_id
from fcil_adapters.contract import Update
from fcil_adapters.numerics import averaging, client_weights
from fcil_adapters.numerics.class_means import merge_means
from fcil_adapters.numerics.class_reports import ClassReports, federated_means, report_tensors
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.payload import Payload

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def capped_shares(counts, share) -> list[Fraction]:
    """Shares of the owners: whoever is above the cap gets the cap, the others split the rest.

    In exact fractions, one class at a time, the largest first.
    """
    owners = sorted((k for k, n in enumerate(counts) if n > 0), key=lambda k: -counts[k])
    result = [Fraction(0)] * len(counts)
    if not owners:
        return result
    cap = max(Fraction(share), Fraction(1, len(owners)))
    rest = Fraction(1)
    for i, k in enumerate(owners):
        left = sum(int(counts[j]) for j in owners[i:])
        result[k] = min(cap, rest * int(counts[k]) / left)
        rest -= result[k]
    return result


class TestClassWeights:
    @pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.25, 0.01])
    def test_equal_the_definition_in_every_column(self, share):
        rng = np.random.default_rng(0)
        counts = rng.integers(0, 50, (6, 12)) * (rng.random((6, 12)) < 0.6)
        counts[:, 3] = 0
        counts[:, 4] = [0, 0, 9, 0, 0, 0]
        counts[:, 5] = [1000, 1, 1, 1, 1, 1]
        got = client_weights.class_weights(counts, share)
        expected = np.array([capped_shares(column, share) for column in counts.T], float).T
        np.testing.assert_allclose(got, expected, atol=1e-12)

    def test_a_sole_owner_gets_everything_and_no_owner_nothing(self):
        weights = client_weights.class_weights(np.array([[7, 0], [0, 0]]), max_share=0.5)
        assert weights.tolist() == [[1, 0], [0, 0]]

    def test_one_column_is_what_sample_weights_gives(self):
        samples = [5, 1, 3, 90]
        one = client_weights.sample_weights(samples, 0.4)
        np.testing.assert_allclose(one, [float(f) for f in capped_shares(samples, 0.4)])
        assert one.sum() == pytest.approx(1, abs=1e-15)

    @pytest.mark.parametrize("samples", [[], [0, 0]])
    def test_nobody_has_no_weight(self, samples):
        with pytest.raises(DataError):
            client_weights.sample_weights(samples)


def updates(K: int, seed: int = 0) -> UpdateList:
    rng = np.random.default_rng(seed)
    made = []
    for k in range(K):
        tensors = {
            "a": rng.normal(size=(3, 4)).astype(np.float32),
            "b": (1e4 * rng.normal(size=(2,))).astype(np.float32),
            "half": rng.normal(size=(5,)).astype(np.float16),
            "n": np.array([k + 1]),
        }
        made.append(Update(client_id(k), Payload(tensors)))
    return UpdateList.of(made)


class OneAtATime(UpdateList):
    """Fails if an update is still held when the one after the next is asked for."""

    def __iter__(self):
        given = []
        for update in self.updates:
            assert all(ref() is None for ref in given[:-1]), "an earlier update is still held"
            # a payload of its own, which nothing else refers to
            fresh = Payload({n: a.copy() for n, a in update.payload.tensors.items()})
            given.append(weakref.ref(fresh))
            yield Update(update.client, fresh)
            del fresh


class TestWeightedMean:
    @pytest.mark.parametrize("device", DEVICES)
    def test_equals_the_float64_sum_and_comes_out_in_float32(self, device):
        many = updates(5)
        weights = client_weights.sample_weights(many.samples)
        got = averaging.weighted_mean(many, ("a", "b", "half"), weights, device)
        for name, array in got.items():
            terms = [u.payload.tensors[name].astype(np.float64) for u in many]
            expected = sum(w * x for w, x in zip(weights, terms, strict=True))
            np.testing.assert_allclose(array, expected, rtol=1e-7)
            assert array.dtype == np.float32
            assert array.shape == many.updates[0].payload.tensors[name].shape

    def test_is_what_methods_without_torch_compute(self):
        many = updates(4)
        weights = client_weights.sample_weights(many.samples)
        one = averaging.weighted_mean(many, ("a", "b"), weights, "cpu")
        other = client_weights.weighted_mean(many, ("a", "b"), weights)
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-7)

    def test_one_client_is_the_identity(self):
        many = updates(1)
        got = averaging.weighted_mean(many, ("a", "b"), np.ones(1), "cpu")
        for name, array in got.items():
            np.testing.assert_array_equal(array, many.updates[0].payload.tensors[name])

    def test_small_terms_are_not_lost_beside_large_ones(self):
        """Added up in float32, the ones would vanish beside 2^24."""
        sizes = [2.0**24, 1.0, 1.0, -(2.0**24)]
        many = UpdateList(
            tuple(Update(client_id(k), Payload({"x": np.array([v], np.float32)}))
                  for k, v in enumerate(sizes))
        )  # fmt: skip
        got = averaging.weighted_mean(many, ("x",), np.full(4, 0.25), "cpu")
        assert got["x"].tolist() == [0.5]

    def test_no_update_is_held_longer_than_its_turn(self):
        many = OneAtATime(updates(6).updates)
        averaging.weighted_mean(many, ("a", "b"), np.full(6, 1 / 6), "cpu")
        with pytest.raises(AssertionError, match="still held"):
            list(many)


CLASSES = (7, 3, 9)


def reports(seed: int = 0, least: int = 1) -> tuple[UpdateList, dict[int, np.ndarray]]:
    """Four clients' reports, and all features by class; nobody has class 9."""
    rng = np.random.default_rng(seed)
    images = [{7: 5, 3: 0}, {7: 1, 3: 4}, {7: 0, 3: 2}, {7: 2, 3: 1}]
    pooled: dict[int, list[np.ndarray]] = {c: [] for c in CLASSES}
    made = []
    for k, own in enumerate(images):
        counts = np.array([own.get(c, 0) for c in CLASSES])
        means = np.zeros((3, 4))
        for row, c in enumerate(CLASSES):
            features = rng.normal(size=(counts[row], 4))
            if counts[row] >= least:
                means[row] = features.mean(0)
                pooled[c].append(features)
        tensors = report_tensors(CLASSES, means, counts, least)
        tensors["proto"] = rng.normal(size=(3, 4)).astype(np.float32)
        made.append(Update(client_id(k), Payload(tensors)))
    none = np.zeros((0, 4))
    return UpdateList.of(made), {c: np.concatenate([none, *f]) for c, f in pooled.items()}


def test_merged_means_never_read_rows_without_images():
    means = np.array([[[1.0, 2.0]], [[np.nan, np.inf]], [[4.0, 8.0]]], np.float32)
    merged, totals = merge_means(means, np.array([[2], [0], [1]]))
    np.testing.assert_allclose(merged, [[2, 4]], rtol=1e-12)
    assert totals.tolist() == [3]


class TestFederatedMeans:
    @pytest.mark.parametrize("least", [1, 2])
    def test_are_the_means_over_all_images_of_all_clients(self, least):
        many, pooled = reports(least=least)
        means, totals = federated_means(many, CLASSES, 1.0)
        assert totals.tolist() == [len(pooled[c]) for c in CLASSES]
        for row, c in enumerate(CLASSES[:2]):
            np.testing.assert_allclose(means[row], pooled[c].mean(0), atol=1e-6)
        assert not means[2].any()

    @pytest.mark.parametrize("share", [1.0, 0.5])
    def test_are_those_of_the_stacked_reports(self, share):
        many, _ = reports()
        stacked = ClassReports.of(many, CLASSES)
        expected, totals = merge_means(stacked.means, stacked.counts, share)
        means, counted = federated_means(many, CLASSES, share)
        np.testing.assert_allclose(means, expected, atol=1e-12)
        assert counted.tolist() == totals.tolist()

    def test_no_report_is_held_longer_than_its_turn(self):
        many, _ = reports()
        federated_means(OneAtATime(many.updates), CLASSES, 1.0)
