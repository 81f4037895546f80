"""The teaching method: thumbnails, exact means, frozen tasks, and what it takes to learn."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from adapters.kit import Federation, Images, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.methods.running_mean.thumbnails import area_weights, thumbnails
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [
    toy_images({0: 6, 1: 2, 5: 1}, 1),
    toy_images({0: 1, 5: 3}, 2),
    toy_images({1: 4, 4: 2}, 3),
]


def pooled(c: int) -> np.ndarray:
    """The mean thumbnail over all clients' images of a class."""
    pictures = np.concatenate([images.of([c]).pictures for images in CLIENTS])
    return thumbnails(pictures, 8).mean(0)


class TestThumbnails:
    def test_each_pixel_is_the_mean_of_its_area_and_of_the_colours(self):
        images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
        small = thumbnails(images, 8).reshape(2, 8, 8)
        for y in range(8):
            for x in range(8):
                area = images[1, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
                assert small[1, y, x] == pytest.approx(area.mean() / 255)

    @pytest.mark.parametrize(("size", "side"), [(16, 8), (10, 8), (3, 8), (224, 8), (1, 1)])
    def test_areas_of_any_size_share_the_pixels_evenly(self, size, side):
        weights = area_weights(size, side)
        assert weights.shape == (side, size)
        np.testing.assert_allclose(weights.sum(1), 1)
        np.testing.assert_allclose(weights.sum(0), side / size)

    def test_white_is_one(self):
        assert thumbnails(np.full((1, 5, 5, 3), 255, np.uint8), 3)[0] == pytest.approx(np.ones(9))


class TestLearning:
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_prototypes_are_exactly_the_means_over_all_images(self, rounds):
        fed = Federation.of("running_mean", CLIENTS)
        fed.run(TASKS[0], rounds)
        part = fed.parts()["current"]
        for row, c in enumerate((0, 1)):
            np.testing.assert_allclose(part.tensors["mean"][row], pooled(c), atol=1e-6)
        assert part.tensors["count"].tolist() == [7 * rounds, 6 * rounds, 0]

    def test_a_client_that_leaves_is_not_forgotten(self):
        fed = Federation.of("running_mean", CLIENTS)
        fed.open(TASKS[0])
        fed.round()
        fed.clients = CLIENTS[:1]
        fed.round()
        first, later = (CLIENTS[0].of([1]), toy_images({1: 4}, 3).of([1]))
        twice = np.concatenate([first.pictures, first.pictures, later.pictures])
        got = fed.parts()["current"].tensors["mean"][1]
        np.testing.assert_allclose(got, thumbnails(twice, 8).mean(0), atol=1e-6)

    def test_finished_tasks_stay_and_classes_without_images_are_no_candidates(self):
        fed = Federation.of("running_mean", CLIENTS)
        fed.run(TASKS[0])
        finished = pack(fed.parts()["current"])
        fed.run(TASKS[1])
        assert pack(fed.parts()["task/0"]) == finished
        assert fed.predictor().classes == (0, 1, 5, 4)

    def test_it_recognises_new_pictures(self):
        fed = Federation.of("running_mean", CLIENTS, side=4)
        for task in TASKS:
            fed.run(task)
        test = toy_images({0: 5, 1: 5, 5: 5, 4: 5}, 9)
        _, correct, total = evaluate(fed.predictor(), test)
        assert correct.sum() / total.sum() > 0.9

    def test_a_mean_beyond_what_pixels_can_be_is_cut(self):
        """Clients of masked rounds add noise to their sums."""
        fed = Federation.of("running_mean", CLIENTS)
        fed.open(TASKS[0])
        sent = fed.upload("train", 0)
        far = {**sent.tensors, "mean": sent.f32("mean") * 9 - 4}
        update = Update(client_id(0), replace(sent, tensors=far))
        fed.state = fed.aggregate("train", UpdateList.of([update]))
        mean = fed.parts()["current"].tensors["mean"]  # checked by its schema
        assert (mean.min(), mean.max()) == (0, 1)

    def test_the_weight_cap_holds_within_a_class(self):
        big = [toy_images({0: 50}, 1), toy_images({0: 1}, 2), toy_images({0: 1}, 3)]
        fed = Federation.of("running_mean", big, max_weight_share=0.5)
        fed.run(TASKS[0])
        means = [thumbnails(images.pictures, 8).mean(0) for images in big]
        expected = 0.5 * means[0] + 0.25 * (means[1] + means[2])
        np.testing.assert_allclose(fed.parts()["current"].tensors["mean"][0], expected, atol=1e-6)


class TestEdges:
    def test_a_client_without_images_sends_zero_and_is_dropped(self):
        fed = Federation.of("running_mean", [*CLIENTS, toy_images({})])
        fed.open(TASKS[0])
        sent = fed.upload("train", 3)
        assert sent.tensors["n"].tolist() == [0]
        assert len(UpdateList.of([Update(client_id(3), sent)])) == 0

    def test_counts_that_contradict_n_are_named(self):
        fed = Federation.of("running_mean", CLIENTS)
        fed.open(TASKS[0])
        sent = fed.upload("train", 0)
        wrong = Payload({**sent.tensors, "n": np.array([3])})
        assert fed.exchanges[0].check(wrong, fed.task) == [
            "'n': expected 8, the sum of 'count', got 3"
        ]

    def test_before_the_first_update_there_are_no_candidates(self):
        fed = Federation.of("running_mean", CLIENTS)
        fed.open(TASKS[0])
        predictor = fed.predictor()
        assert predictor.classes == ()
        images = Images(CLIENTS[0].pictures, CLIENTS[0].labels)
        assert predictor.logits(images.pictures).shape == (len(images), 0)


def test_the_whole_method_runs_without_torch():
    """Manifest, halves and model import in a process in which torch cannot be imported."""
    code = """
import sys
sys.modules["torch"] = sys.modules["timm"] = None
from fcil_adapters.contract.registry import load_half, load_method
method = load_method("running_mean")
for half in (method.learner, method.aggregator, method.model):
    load_half(half)
load_method("pilora")
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")
