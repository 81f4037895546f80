"""Prototype re-weighting against loops that follow its definition, and every edge case."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fcil_adapters.toolkit.prototypes.options import ReweightOptions
from fcil_adapters.toolkit.prototypes.reweighting import reweight

K, C, D = 5, 4, 6


def by_definition(protos, means, counts, previous, weights, o):
    """Steps 2 to 6 class by class and client by client, in plain Python floats."""
    clients = range(len(protos))
    result, omega = [], [[0.0] * len(previous) for _ in clients]
    for c in range(len(previous)):
        owners = [i for i in clients if counts[i][c] >= o.min_count]
        if not owners:
            if o.empty == "keep":
                result.append(list(previous[c]))
                continue
            share = {k: 1 / len(protos) for k in clients}
        elif not o.enabled:
            share = dict(enumerate(weights))
        else:
            share = weights_of_a_class(c, protos, means, counts, owners, o)
        for k, w in share.items():
            omega[k][c] = w
        result.append([sum(w * protos[k][c][j] for k, w in share.items()) for j in range(D)])
    return np.array(result), np.array(omega)


def weights_of_a_class(c, protos, means, counts, owners, o):
    clients = owners if o.owners_only else range(len(protos))
    p = {}
    for k in clients:
        d = 0.0
        for i in owners:
            sq = sum((protos[k][c][j] - means[i][c][j]) ** 2 for j in range(D))
            dist = sq if o.distance == "squared" else math.sqrt(sq)
            d += dist * (counts[i][c] if o.count_weighted else 1)
        p[k] = 1 / max(d, 1e-12)
    low, high = min(p.values()), max(p.values())
    if high == low:
        return {k: 1 / len(p) for k in p}
    a = {k: (v - low) / (high - low) for k, v in p.items()}
    e = {k: math.exp(v / o.eta if o.temperature == "div" else v * o.eta) for k, v in a.items()}
    return {k: v / sum(e.values()) for k, v in e.items()}


def random_case(seed: int, k: int = K):
    rng = np.random.default_rng(seed)
    protos = rng.normal(size=(k, C, D)).astype(np.float32)
    means = rng.normal(size=(k, C, D)).astype(np.float32)
    counts = rng.integers(0, 5, (k, C)) * (rng.random((k, C)) < 0.6)
    counts[:, 3] = 0  # nobody
    counts[:, 2] = 0
    counts[k // 2, 2] = 3  # one owner
    samples = rng.integers(1, 50, k)
    return (
        protos,
        means,
        counts,
        rng.normal(size=(C, D)).astype(np.float32),
        samples / samples.sum(),
    )


def run(case, **options):
    new, omega = reweight(*(torch.tensor(x) for x in case), options=ReweightOptions(**options))
    return new.numpy(), omega.numpy()


VARIANTS = [
    {"temperature": t, "distance": d, "owners_only": o, "count_weighted": w}
    for t, d, o, w in itertools.product(
        ("div", "mul"), ("plain", "squared"), (False, True), (False, True)
    )
]
OTHERS = [
    {"enabled": False},
    {"enabled": False, "empty": "uniform"},
    {"empty": "uniform"},
    {"min_count": 3},
    {"min_count": 3, "owners_only": True},
    {"eta": 1.7},
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", VARIANTS + OTHERS, ids=str)
def test_every_variant_equals_its_definition(options, seed):
    case = random_case(seed)
    new, omega = run(case, **options)
    expected, expected_omega = by_definition(
        *(x.tolist() for x in case), ReweightOptions(**options)
    )
    np.testing.assert_allclose(omega, expected_omega, atol=1e-12)
    np.testing.assert_allclose(new, expected, atol=1e-12)
    assert new.dtype == np.float64


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_weights_of_every_class_that_somebody_has_sum_to_one(options):
    _, omega = run(random_case(2), **options)
    np.testing.assert_allclose(omega[:, :3].sum(0), 1, atol=1e-12)
    assert (omega >= 0).all()


@pytest.mark.parametrize("options", VARIANTS + OTHERS, ids=str)
def test_the_order_of_clients_does_not_matter(options):
    protos, means, counts, previous, weights = random_case(3)
    order = np.array([3, 0, 4, 1, 2])
    one, omega = run((protos, means, counts, previous, weights), **options)
    other, moved = run(
        (protos[order], means[order], counts[order], previous, weights[order]), **options
    )
    np.testing.assert_allclose(other, one, atol=1e-12)
    np.testing.assert_allclose(moved, omega[order], atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS + OTHERS[:2], ids=str)
def test_one_client_alone_gets_all_the_weight(options):
    protos, means, counts, previous, _ = random_case(4, k=1)
    counts[0] = [1, 2, 7, 0]
    new, omega = run((protos, means, counts, previous, np.ones(1)), **options)
    assert omega[0, :3].tolist() == [1, 1, 1]
    np.testing.assert_allclose(new[:3], protos[0, :3])


def test_equal_distances_give_equal_weights_and_no_nan():
    """Minimum equals maximum: the published code divides by zero here."""
    protos, means, counts, previous, weights = random_case(5)
    protos[:] = protos[0]
    counts[:] = 2
    new, omega = run((protos, means, counts, previous, weights))
    np.testing.assert_allclose(omega, 1 / K)
    np.testing.assert_allclose(new, protos[0], atol=1e-12)


def test_rounding_errors_are_not_stretched_into_weights():
    """Distances that differ by less than arithmetic can tell still count as equal."""
    protos = np.zeros((2, 1, D))
    protos[1] = 1e-15
    means = np.ones((2, 1, D))
    _, omega = run((protos, means, np.ones((2, 1)), np.zeros((1, D)), np.full(2, 0.5)))
    np.testing.assert_allclose(omega, 0.5)


def test_a_sole_owner_at_distance_zero_gets_e5_over_e5_plus_the_others():
    protos, means, counts, previous, weights = random_case(6)
    counts[:] = 0
    counts[1] = 4
    means[1] = protos[1]
    _, omega = run((protos, means, counts, previous, weights))
    np.testing.assert_allclose(omega[1], math.exp(5) / (math.exp(5) + K - 1), rtol=1e-9)
    _, only = run((protos, means, counts, previous, weights), owners_only=True)
    np.testing.assert_allclose(only[1], 1)
    assert only[[0, 2, 3, 4]].max() == 0


def test_a_class_that_nobody_has_keeps_its_prototype_or_takes_the_mean():
    case = random_case(7)
    new, omega = run(case)
    assert new[3].tolist() == case[3][3].astype(np.float64).tolist()
    assert omega[:, 3].tolist() == [0] * K
    new, omega = run(case, empty="uniform")
    np.testing.assert_allclose(new[3], case[0][:, 3].mean(0), atol=1e-6)
    np.testing.assert_allclose(omega[:, 3], 1 / K)


def test_means_of_clients_without_the_class_are_never_read():
    protos, means, counts, previous, weights = random_case(8)
    expected = run((protos, means, counts, previous, weights))
    garbage = means.copy()
    garbage[counts == 0] = np.nan
    for got, wanted in zip(
        run((protos, garbage, counts, previous, weights)), expected, strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_prototypes_near_the_owners_mean_outweigh_those_pushed_away():
    """The point of the method: what a client without the class did to it hardly counts."""
    mean = np.full((2, 1, D), 1.0)
    protos = np.stack([np.full((1, D), 1.1), np.full((1, D), -5.0)])
    counts = np.array([[30], [0]])
    new, _ = run((protos, mean, counts, np.zeros((1, D)), np.full(2, 0.5)))
    plain, _ = run((protos, mean, counts, np.zeros((1, D)), np.full(2, 0.5)), enabled=False)
    assert np.abs(new - 1).max() < 0.2
    assert np.abs(plain - 1).max() > 2


@pytest.mark.parametrize(
    "wrong",
    [{"eta": 0}, {"temperature": "log"}, {"distance": "cosine"}, {"min_count": 0}, {"etaa": 1}],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        ReweightOptions(**wrong)
