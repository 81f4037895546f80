"""The Gaussian head: moments of everybody's features, and the head that they give."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.discriminant_reference import from_first, log_posteriors
from adapters.frozen_kit import Colours, pooled
from adapters.kit import Federation, Images, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.numerics.scores import quadratic
from fcil_adapters.toolkit.gaussians.discriminants import (
    Moments,
    linear_discriminant,
    quadratic_discriminant,
)
from fcil_adapters.toolkit.gaussians.gaussian import describe
from fcil_adapters.toolkit.gaussians.mixture import make_mixture
from fcil_adapters.toolkit.gaussians.store import ClassEntry, read_entries
from fcil_protocol.payloads.payload import Payload, pack

COLOURS = Colours()
TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [
    toy_images({0: 9, 1: 4, 5: 3}, 1),
    toy_images({0: 3, 5: 6}, 2),
    toy_images({1: 6, 4: 5}, 3),
]
QUICK = {"samples_per_class": 16, "server_epochs": 2, "cov_rank": 2}


def learned(clients=CLIENTS, tasks=TASKS, **options) -> Federation:
    fed = Federation.of("gaussian_head", clients, COLOURS, **{**QUICK, **options})
    for task in tasks:
        fed.run(task, rounds=3)
    return fed


def accuracy(fed) -> float:
    test = toy_images({0: 5, 1: 5, 5: 5, 4: 5}, 9)
    predictor = fed.predictor()
    best = np.array(predictor.classes)[predictor.logits(test.pictures).argmax(1)]
    return (best == test.labels).mean()


def features_of(images: Images, c: int) -> np.ndarray:
    return COLOURS.features(images.of([c]).pictures).astype(np.float64)


def exact_lda(clients, classes, shrinkage, *, uniform=False):
    """Rows and biases by loops: each client's unbiased covariance, weighed by its images."""
    means, within, counts = [], 0.0, []
    for c in classes:
        own = [features_of(images, c) for images in clients if len(images.of([c]))]
        n = np.array([len(x) for x in own])
        mean = sum(k * x.mean(0) for k, x in zip(n, own, strict=True)) / n.sum()
        covs = [np.cov(x.T) + np.outer(x.mean(0) - mean, x.mean(0) - mean) for x in own]
        means.append(mean)
        counts.append(n.sum())
        shared = sum(k * cov for k, cov in zip(n, covs, strict=True)) / n.sum()
        within = within + (1 if uniform else n.sum()) * shared
    omega = np.ones(len(classes)) if uniform else np.array(counts, dtype=float)
    within, omega = within / omega.sum(), omega / omega.sum()
    d = len(within)
    inverse = np.linalg.inv((1 - shrinkage) * within + shrinkage * np.trace(within) / d * np.eye(d))
    means = np.stack(means)
    return means @ inverse, np.log(omega) - 0.5 * np.einsum("ci,ij,cj->c", means, inverse, means)


@pytest.mark.parametrize("uniform", [False, True])
def test_lda_is_that_of_everybodys_moments(uniform):
    weights = "uniform" if uniform else "counts"
    fed = learned(cov="full", head="lda", shrinkage=0.05, class_weights=weights)
    weight, bias = exact_lda(CLIENTS, (0, 1, 5, 4), 0.05, uniform=uniform)
    assert fed.state.i64("classes").tolist() == [0, 1, 5, 4]
    np.testing.assert_allclose(fed.state.f32("weight"), weight, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(fed.state.f32("bias"), bias, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("cov", ["lowrank", "full", "diag"])
@pytest.mark.parametrize("head", ["trained", "lda", "quadratic"])
def test_it_recognises_new_pictures_of_all_tasks(cov, head):
    assert accuracy(learned(cov=cov, head=head)) > 0.9


def test_training_on_draws_moves_the_head_from_where_lda_put_it():
    rng = np.random.default_rng(2)  # pictures that nobody could tell apart
    vague = [Images(rng.integers(0, 256, images.pictures.shape, np.uint8), images.labels)
             for images in CLIENTS]  # fmt: skip
    trained, again, lda = (learned(vague, head=head) for head in ("trained", "trained", "lda"))
    assert not np.array_equal(trained.state.f32("weight"), lda.state.f32("weight"))
    assert pack(again.state) == pack(trained.state), "draws follow from the seed"


def test_old_classes_keep_their_gaussians_and_share_the_new_head():
    fed = learned(tasks=TASKS[:1])
    before = {n: a for n, a in fed.state.tensors.items() if n.startswith("gauss.0.")}
    first = fed.state.f32("weight")
    fed.run(TASKS[1])
    for name, array in before.items():
        np.testing.assert_array_equal(fed.state.tensors[name], array)
    assert fed.state.f32("weight").shape[0] == first.shape[0] + 2
    assert set(fed.parts()) == {"current"}, "Gaussians stay on the server"


def test_an_update_of_a_later_round_replaces_the_clients_own():
    fed = learned(CLIENTS[:1], TASKS[:1], head="lda")
    once = pack(fed.state)
    fed.round()
    assert pack(fed.state) == once


def test_a_class_of_single_images_borrows_a_covariance():
    clients = [toy_images({0: 1, 1: 6}, 1), toy_images({0: 1}, 2)]
    fed = learned(clients, make_tasks([0, 1]), head="lda")
    assert set(fed.predictor().classes) == {0, 1}
    assert np.isfinite(fed.state.f32("weight")).all()


def test_one_class_in_all_is_its_only_candidate():
    for head in ("trained", "lda", "quadratic"):
        fed = learned([toy_images({3: 1})], make_tasks([3]), head=head)
        assert fed.predictor().classes == (3,)
        assert np.isfinite(fed.state.f32("weight")).all()


def test_images_at_home_leave_no_trace():
    fed = learned([toy_images({0: 4, 1: 1})], make_tasks([0, 1]), min_count_upload=2)
    assert fed.predictor().classes == (0,)


def test_a_round_in_which_everything_stays_at_home_changes_nothing():
    fed = learned([toy_images({0: 1})], make_tasks([0]), min_count_upload=2)
    assert fed.predictor().classes == ()


def test_a_claimed_million_images_weigh_no_more_than_the_cap():
    def inflated(payload):
        if payload.i64("n")[0] != len(CLIENTS[1].of((0, 1, 2))):
            return payload
        count = payload.i64("count") * 10**6
        return Payload({**payload.tensors, "count": count, "n": count.sum().reshape(1)})

    fed = Federation.of("gaussian_head", CLIENTS[:2], COLOURS, max_weight_share=0.5, head="lda",
                        cov="diag")  # fmt: skip
    fed.open(TASKS[0])
    fed.round(alter=inflated)
    mixture = make_mixture(read_entries(fed.state, [0]), (0, 1, 2), "counts", 0.5)
    assert mixture.pi[0].max() == pytest.approx(0.5)
    weight, _ = linear_discriminant(mixture, fed.hparams.shrinkage)
    np.testing.assert_allclose(fed.state.f32("weight"), weight, rtol=1e-5)


class TestQuadratic:
    SHARES = (0.4, 0.7, 0.2)

    def mixture(self, **more):
        """Return one of three classes, one of them too small for a covariance of its own."""
        rng = np.random.default_rng(5)
        entries = []
        for c, sizes in enumerate([(30, 9), (12,), (4, 3)]):
            for k, n in enumerate(sizes):
                x = rng.normal(size=(n, 6)) @ rng.normal(size=(6, 6)) + 2 * c + k
                gaussian = describe(x, more.get("cov", "full"), 2)
                entries.append(ClassEntry(0, c, str(client_id(k)), gaussian))
        return make_mixture(entries, (0, 1, 2), "counts")

    @pytest.mark.parametrize("cov", ["full", "lowrank", "diag"])
    @pytest.mark.parametrize("rank", [1, 3, 20])
    def test_it_is_the_log_posterior_of_the_regularised_gaussians(self, cov, rank):
        mixture = self.mixture(cov=cov)
        found = quadratic_discriminant(mixture, rank, self.SHARES)
        x = np.random.default_rng(6).normal(size=(40, 6)) * 3
        scores = quadratic(x, found.weight, found.bias, found.turn, found.offset)
        wanted = log_posteriors(mixture, x, rank, self.SHARES)
        np.testing.assert_allclose(from_first(scores), from_first(wanted), rtol=1e-6, atol=1e-8)
        assert not found.turn[2].any(), "seven images are too few for a covariance"
        assert found.turn[0].any()

    @pytest.mark.parametrize("sizes", [(1,) * 40, (1, 1, 5, 9), (1,)])
    def test_a_class_of_single_images_has_the_scatter_of_its_images(self, sizes):
        """Against the images: what drawing lends to one image would count its scatter twice."""
        rng = np.random.default_rng(5)
        owned = [rng.normal(size=(n, 6)) * (1, 2, 3, 1, 2, 3) for n in sizes]
        other = rng.normal(size=(30, 6))
        entries = [ClassEntry(0, 1, str(client_id(99)), describe(other, "full", 2))]
        for k, x in enumerate(owned):
            entries.append(ClassEntry(0, 0, str(client_id(k)), describe(x, "full", 2)))
        found = Moments.of(make_mixture(entries, (0, 1), "counts"))
        count = sum(sizes)
        mean = np.concatenate(owned).mean(0)
        wanted = np.zeros((6, 6))
        for x in owned:
            away = x.mean(0) - mean
            scatter = np.cov(x.T) if len(x) > 1 else np.zeros((6, 6))
            wanted += len(x) / count * (scatter + np.outer(away, away))
        got = found.rows[0].T @ found.rows[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        both = (count * wanted + 30 * np.cov(other.T)) / (count + 30)
        np.testing.assert_allclose(found.within, both, rtol=1e-5, atol=1e-6)

    def test_without_a_covariance_of_its_own_it_is_linear(self):
        mixture = self.mixture()
        found = quadratic_discriminant(mixture, 4, (0.0, 0.9, 0.1))
        weight, bias = linear_discriminant(mixture, 0.1)
        assert not found.turn.any()
        np.testing.assert_allclose(found.weight, weight, rtol=1e-9)
        np.testing.assert_allclose(found.bias, bias, rtol=1e-9)

    @pytest.mark.parametrize("classes", [[0, 1], [0]])
    @pytest.mark.parametrize("copies", [1, 9])
    def test_images_that_are_all_alike_end_with_numbers_that_may_be_sent(self, classes, copies):
        """Of one class too, of which all images are the same."""
        one = toy_images(dict.fromkeys(classes, 1))
        same = Images(one.pictures.repeat(copies, 0), one.labels.repeat(copies))
        fed = learned([same], make_tasks(classes), head="quadratic")
        for name in ("weight", "bias", "turn", "offset"):
            assert np.abs(fed.state.f32(name)).max(initial=0) < 1e12


def test_gaussians_that_contradict_the_counts_are_named():
    fed = Federation.of("gaussian_head", CLIENTS, COLOURS, **QUICK)
    fed.open(TASKS[0])
    sent = Update(client_id(0), fed.upload("train", 0)).payload
    wrong = Payload({**sent.tensors, "gauss.mean": sent.f32("gauss.mean")[:1]})
    assert fed.exchanges[0].check(wrong, fed.task) == [
        "'gauss.mean': the counts ask for 2 rows, got 1"
    ]


def test_one_machine_with_all_images_differs_only_by_how_covariances_are_pooled():
    apart, together = (learned(clients, cov="full", head="lda") for clients in
                       (CLIENTS, [pooled(CLIENTS)]))  # fmt: skip
    means = [f.state.f32("weight") for f in (apart, together)]
    cosine = (means[0] * means[1]).sum(1) / np.prod([np.linalg.norm(m, axis=1) for m in means], 0)
    assert cosine.min() > 0.8
