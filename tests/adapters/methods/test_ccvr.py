"""CCVR: what clients describe, what is drawn of it, and the head that is fitted to that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.discriminant_reference import from_first, log_posteriors
from adapters.kit import DIM, Federation, client_id, make_tasks, toy_backbone, toy_images
from adapters.lora_reference import features, parameters
from fcil_adapters.contract import Update
from fcil_adapters.methods.ccvr.pooling import merge_gaussians, pooled
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.gaussians.gaussian import Gaussian
from fcil_adapters.toolkit.gaussians.mixture import make_mixture
from fcil_adapters.toolkit.gaussians.store import read_entries
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.payloads.payload import pack

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [toy_images({0: 6, 1: 2, 5: 4}, 1), toy_images({0: 4, 5: 3}, 2),
           toy_images({1: 4, 4: 5}, 3)]  # fmt: skip
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_lora": 0.05, "augment": "none",
        "samples_per_class": 32, "server_epochs": 3, "server_batch": 16}  # fmt: skip


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(backbone, clients=CLIENTS, **kw) -> Federation:
    return Federation.of("ccvr", clients, backbone, **{**FAST, **kw})


def of_class(fed, c) -> list[np.ndarray]:
    """Features of a class on each client that has it, under the model of this moment."""
    values = parameters(fed.parts())
    return [features(fed.backbone, values, x.of([c])).detach().numpy()
            for x in fed.clients if c in x.labels]  # fmt: skip


def rows(fed, part="calibrated") -> dict[int, np.ndarray]:
    sent = fed.parts()[part].tensors
    return dict(zip(sent["classes"].tolist(), sent["head.weight"], strict=True))


class TestDescriptions:
    @pytest.mark.parametrize("combine", ["mixture", "pooled"])
    def test_have_the_mean_and_covariance_of_all_images(self, backbone, combine):
        """Luo et al., Eq. 3 and 4: what one machine with all images would compute."""
        fed = federation(backbone, cov="full")
        fed.run(TASKS[0])
        mixture = make_mixture(read_entries(fed.state, [0]), (0, 1), "counts")
        for c in (0, 1):
            together = np.concatenate(of_class(fed, c))
            one = mixture if combine == "mixture" else pooled(mixture)
            np.testing.assert_allclose(one.mean(c), together.mean(0), atol=2e-3)
            if combine == "pooled":
                (gaussian,) = one.gaussians[c]
                expected = np.cov(together.T)
                got = gaussian.covariance()
                assert np.abs(got - expected).max() < 1e-2 * np.abs(expected).max()

    def test_samples_have_the_moments_of_the_pooled_gaussian(self):
        rng = np.random.default_rng(0)
        parts = [
            rng.normal(size=(n, 5)) @ rng.normal(size=(5, 5)) + m for n, m in ((9, 1), (4, -2))
        ]
        described = tuple(
            Gaussian(len(x), x.mean(0), (x - x.mean(0)) / np.sqrt(len(x) - 1), np.zeros(5))
            for x in parts
        )
        merged = merge_gaussians(described, np.array([9, 4]) / 13)
        together = np.concatenate(parts)
        np.testing.assert_allclose(merged.mean, together.mean(0))
        np.testing.assert_allclose(merged.covariance(), np.cov(together.T))
        assert merged.count == 13

    def test_single_images_are_drawn_with_a_covariance_that_they_borrow(self, backbone):
        lonely = [toy_images({0: 1, 1: 4}, 1), toy_images({0: 1}, 2)]
        for combine in ("mixture", "pooled"):
            fed = federation(backbone, lonely, combine=combine)
            fed.run(TASKS[0])
            assert np.isfinite(rows(fed)[0]).all()
            assert fed.predictor().classes == (0, 1)

    def test_few_images_stay_at_home_and_their_row_as_training_left_it(self, backbone):
        fed = federation(backbone, min_count_upload=5)
        fed.open(TASKS[0])
        fed.round("train")
        trained = rows(fed, "current")
        assert fed.upload("finish", 0).f32("gauss.mean").shape == (1, DIM)
        fed.round("finish")
        np.testing.assert_array_equal(rows(fed)[1], trained[1])
        assert fed.predictor().classes == (0, 1)


class TestCalibration:
    def accuracy(self, fed, classes) -> float:
        images = toy_images(dict.fromkeys(classes, 10), 7)
        _, correct, total = evaluate(fed.predictor(), images)
        return float(correct.sum() / total.sum())

    def test_keeps_old_classes_that_the_plain_average_loses(self, backbone):
        clients = [toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 8), s) for s in (1, 2)]
        tasks = make_tasks([3, 4], [7, 2], [5, 9])
        shared = {k: FAST[k] for k in ("rank", "blocks", "augment")}
        shared |= {"epochs": 3, "lr_lora": 0.02, "lr_head": 0.1, "batch_size": 8}
        plain = Federation.of("fedavg_lora", clients, backbone, **shared)
        ours = Federation.of("ccvr", clients, backbone, **shared, server_lr=0.05)
        for task in tasks:
            plain.run(task)
            ours.run(task)
        old = (3, 4, 7, 2)
        assert self.accuracy(ours, old) > self.accuracy(plain, old) + 0.1

    @pytest.mark.parametrize(("mode", "past_moves"), [("seen", True), ("current", False)])
    def test_moves_the_rows_of_all_seen_classes_or_of_the_task(self, backbone, mode, past_moves):
        fed = federation(backbone, calibrate=mode)
        fed.run(TASKS[0])
        before = rows(fed)
        fed.run(TASKS[1])
        after, trained = rows(fed), rows(fed, "current")
        assert list(after) == [0, 1, 2, 5, 4]
        assert [np.abs(after[c] - before[c]).max() > 1e-6 for c in (0, 1)] == [past_moves] * 2
        np.testing.assert_array_equal(after[2], before[2])  # nobody ever had it
        assert all(np.abs(after[c] - trained[c]).max() > 1e-6 for c in (5, 4))

    def test_changes_no_part_but_its_own_and_no_client_sees_a_gaussian(self, backbone):
        fed = federation(backbone)
        fed.run(TASKS[0])
        fed.open(TASKS[1])
        fed.round("train")
        before = fed.parts()
        fed.round("finish")
        after = fed.parts()
        assert {n for n in after if pack(after[n]) != pack(before[n])} == {"calibrated"}
        assert not [n for p in after.values() for n in p.tensors if n.startswith("gauss")]

    def test_a_task_whose_end_nobody_answers_keeps_its_trained_rows(self, backbone):
        fed = federation(backbone)
        fed.run(TASKS[0])
        fed.open(TASKS[1])
        fed.round("train")
        trained = rows(fed, "current")
        fed.open(make_tasks([0, 1, 2], [5, 4], [8, 9])[2])
        fed.clients = [toy_images({8: 4, 9: 4}, 5)]
        fed.round("train")
        assert fed.predictor().classes == (0, 1, 5, 4, 8, 9)
        np.testing.assert_array_equal(rows(fed)[5], trained[5])
        fed.round("finish")
        assert set(rows(fed)) == {0, 1, 2, 5, 4, 8, 9}
        np.testing.assert_array_equal(rows(fed)[5], trained[5])  # there is nothing to draw

    def test_one_class_is_not_calibrated_and_more_are(self, backbone):
        fitted = {"samples_per_class": 64, "server_epochs": 6, "server_lr": 0.05}
        fed = federation(backbone, [toy_images({6: 4, 7: 4, 8: 4}, 1)], **fitted)
        single, *later = make_tasks([6], [7], [8])
        fed.run(single)
        np.testing.assert_array_equal(rows(fed)[6], rows(fed, "current")[6])
        assert np.linalg.norm(rows(fed)[6]) == pytest.approx(1, rel=1e-3)
        for task in later:
            fed.run(task)
        assert self.accuracy(fed, (6, 7, 8)) > 0.7

    def test_a_class_that_came_after_the_training_rounds_is_a_candidate(self, backbone):
        fed = federation(backbone, [toy_images({0: 5}, 1)])
        fed.open(TASKS[0])
        fed.round("train")
        fed.clients = [toy_images({0: 5, 1: 5}, 1)]
        fed.round("finish")
        assert fed.predictor().classes == (0, 1)

    def test_absent_clients_count_with_what_they_sent_last(self, backbone):
        fed = federation(backbone)
        fed.run(TASKS[0])
        kept = {(e.label, e.client[0]) for e in read_entries(fed.state, [0])}
        assert kept == {(0, "a"), (0, "b"), (1, "a"), (1, "c")}
        fed.clients = CLIENTS[:1]
        fed.run(TASKS[1])
        assert {(e.label, e.client[0]) for e in read_entries(fed.state, [0])} == kept

    def test_a_liar_with_infinite_counts_is_capped_in_what_is_drawn(self, backbone):
        fed = federation(backbone, max_weight_share=0.5)
        fed.open(TASKS[0])
        fed.round("train")
        sent = [fed.upload("finish", k) for k in range(3)]
        many = {**sent[0].tensors, "count": np.array([6_000_000, 2, 0]),
                "n": np.array([6_000_002])}  # fmt: skip
        sent[0] = replace(sent[0], tensors=many)
        updates = UpdateList.of(Update(client_id(k), p) for k, p in enumerate(sent))
        after = fed.aggregate("finish", updates)
        entries = read_entries(after, [0])
        mixture = make_mixture(entries, (0, 1), "counts", 0.5)
        assert max(pi.max() for pi in mixture.pi) <= 0.5 + 1e-9
        assert torch.isfinite(torch.tensor(after.f32("calibrated.head.weight"))).all()


class TestQuadraticHead:
    OPTIONS = {"head": "quadratic", "own_rank": 2, "own_share": 0.3, "cov": "full"}

    def test_scores_are_log_posteriors_of_the_sent_gaussians(self, backbone):
        clients = [toy_images({0: 9, 1: 4, 5: 8}, 1), toy_images({0: 4, 1: 9, 5: 3}, 2)]
        fed = federation(backbone, clients, **self.OPTIONS)
        fed.run(TASKS[0])
        fed.run(TASKS[1])
        test = toy_images({0: 3, 1: 3, 5: 3}, 9)
        x = features(backbone, parameters(fed.parts()), test).detach().numpy()
        mixture = make_mixture(read_entries(fed.state, [0, 1]), (0, 1, 2, 5, 4), "counts")
        wanted = log_posteriors(mixture, x, 2, (0.3, 1.0, 0.3))
        predictor = fed.predictor()
        assert predictor.classes == (0, 1, 5)
        got = from_first(predictor.logits(test.pictures))
        np.testing.assert_allclose(got, from_first(wanted), rtol=1e-3, atol=1e-3)

    def test_a_class_joins_at_the_end_of_its_task(self, backbone):
        fed = federation(backbone, **self.OPTIONS)
        fed.open(TASKS[0])
        fed.round("train")
        assert fed.predictor().classes == (0, 1)  # trained rows score before there is a head
        fed.round("finish")
        fed.open(TASKS[1])
        fed.round("train")
        assert fed.predictor().classes == (0, 1)
        fed.round("finish")
        assert fed.predictor().classes == (0, 1, 5, 4)
        assert "calibrated.head.weight" not in fed.state.tensors  # nothing is retrained


def test_the_row_of_a_lone_class_is_as_long_as_those_that_score(backbone):
    classes = dict.fromkeys((0, 1, 2, 3), 12)
    fed = federation(backbone, [toy_images(classes, 1)], calibrate="current", server_lr=0.5)
    first, second = make_tasks([0, 1, 2], [3])
    fed.run(first)
    fed.run(second)
    lengths = {c: np.linalg.norm(row) for c, row in rows(fed).items()}
    trained = np.linalg.norm(fed.state.f32("task.0.head.weight"), axis=1).mean()
    expected = np.mean([lengths[c] for c in (0, 1, 2)])
    assert lengths[3] == pytest.approx(expected, rel=1e-3)
    assert abs(trained - expected) > 0.01 * expected, "the calibrated ones have another length"
