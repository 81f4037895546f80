"""FedNCM: exact means of frozen features, and the nearest of them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from adapters.frozen_kit import WIDTH, Colours, pooled
from adapters.kit import Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.numerics.scores import cosines, negative_distances
from fcil_adapters.numerics.task_parts import of_task
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Payload, pack, unpack

COLOURS = Colours()
TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [
    toy_images({0: 6, 1: 2, 5: 1}, 1),
    toy_images({0: 1, 5: 3}, 2),
    toy_images({1: 4, 4: 2}, 3),
]


def learned(clients=CLIENTS, tasks=TASKS, **options) -> Federation:
    fed = Federation.of("fedncm", clients, COLOURS, **options)
    for task in tasks:
        fed.run(task, rounds=3)
    return fed


def mean_of(clients, c: int) -> np.ndarray:
    features = COLOURS.features(pooled([images.of([c]) for images in clients]).pictures)
    return features.astype(np.float64).mean(0)


def test_means_are_those_of_all_images_together():
    parts = learned().parts()
    for name, row, c in (("task/0", 0, 0), ("task/0", 1, 1), ("current", 0, 5), ("current", 1, 4)):
        np.testing.assert_allclose(parts[name].tensors["mean"][row], mean_of(CLIENTS, c), atol=1e-6)
    assert parts["task/0"].i64("count").tolist() == [7, 6, 0], "one round, however many are set"


def test_later_images_join_the_mean_of_everything_counted():
    fed = learned(CLIENTS[:1], TASKS[:1])
    fed.clients = CLIENTS[1:]
    fed.round()
    got = fed.parts()["current"].tensors["mean"][0]
    np.testing.assert_allclose(got, mean_of(CLIENTS, 0), atol=1e-6)


def test_finished_tasks_stay_and_classes_without_images_are_no_candidates():
    fed = learned(tasks=TASKS[:1])
    finished = pack(fed.parts()["current"])
    fed.run(TASKS[1])
    assert pack(fed.parts()["task/0"]) == finished
    assert fed.predictor().classes == (0, 1, 5, 4)


def test_one_update_is_in_memory_at_a_time():
    fed = Federation.of("fedncm", [], COLOURS)
    fed.open(TASKS[0])
    alive: set[int] = set()
    most = 0

    def opened(k: int) -> Update:
        nonlocal most
        packed = pack(Payload({
            "mean": np.full((3, WIDTH), k, np.float32), "count": np.array([k, 1, 0]),
            "n": np.array([k + 1]),
        }))  # fmt: skip
        data = np.frombuffer(packed, np.uint8).copy()  # what all views of the update keep alive
        alive.add(k)
        weakref.finalize(data, alive.discard, k)
        most = max(most, len(alive))
        return Update(client_id(k), unpack(memoryview(data)))

    class Opening(UpdateList):
        def __iter__(self):
            return map(opened, range(1, 5))

    aggregator = fed.aggregator
    state = aggregator.aggregate(fed.context("train"), fed.state, Opening(()))
    assert most <= 2, "the next is opened before the last one is let go"
    assert of_task(state, 0, ["count"])["count"].tolist() == [10, 4, 0]
    np.testing.assert_allclose(of_task(state, 0, ["mean"])["mean"][:, 0], [3, 2.5, 0])


def test_a_capped_client_weighs_half_within_a_class():
    fed = learned(CLIENTS[:2], TASKS[:1], max_weight_share=0.5)
    halves = [mean_of([images], 0) for images in CLIENTS[:2]]
    np.testing.assert_allclose(
        fed.parts()["current"].tensors["mean"][0], sum(halves) / 2, atol=1e-6
    )


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_it_recognises_new_pictures(metric):
    test = toy_images({0: 5, 1: 5, 5: 5, 4: 5}, 9)
    predictor = learned(metric=metric).predictor()
    best = np.array(predictor.classes)[predictor.logits(test.pictures).argmax(1)]
    assert (best == test.labels).mean() > 0.9


def test_scores_are_cosines_or_negative_squared_distances():
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(4, WIDTH)), rng.normal(size=(3, WIDTH))
    for i in range(4):
        for c in range(3):
            lengths = np.linalg.norm(x[i]) * np.linalg.norm(m[c])
            assert cosines(x, m)[i, c] == pytest.approx(x[i] @ m[c] / lengths)
            apart = np.square(x[i] - m[c]).sum()
            assert negative_distances(x, m)[i, c] == pytest.approx(-apart)
    assert np.isfinite(cosines(np.zeros((1, WIDTH)), m)).all()


def test_counts_that_contradict_each_other_are_named():
    fed = Federation.of("fedncm", CLIENTS, COLOURS)
    fed.open(TASKS[0])
    sent = fed.upload("train", 0)
    wrong = Payload({**sent.tensors, "n": np.array([3])})
    assert fed.exchanges[0].check(wrong, fed.task) == ["'n': expected 8, the sum of 'count', got 3"]


def test_before_the_first_update_there_are_no_candidates():
    fed = Federation.of("fedncm", CLIENTS, COLOURS)
    fed.open(TASKS[0])
    assert fed.predictor().logits(CLIENTS[0].pictures).shape == (len(CLIENTS[0]), 0)
