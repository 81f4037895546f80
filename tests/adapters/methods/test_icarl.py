"""iCaRL: exemplars, class means and what they keep, by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.exemplar_kit import KeepingFederation, chosen, digests
from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import cls_features
from fcil_adapters.contract.exemplars import EXEMPLARS, Joined, exemplar_digests
from fcil_adapters.methods.icarl.parts import MEANS
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.views import merged_view

SMALL = {
    "rank": 2, "blocks": [0, 1], "epochs": 4, "batch_size": 8, "augment": "none", "lr_lora": 0.05,
    "lr_head": 0.05, "memory": 8,
}  # fmt: skip
TASKS = make_tasks([3, 1], [5, 4], [2, 0])
CLIENTS = [toy_images(dict.fromkeys(range(6), 7), 1), toy_images({3: 4, 5: 3, 2: 2}, 2)]
TEST = toy_images(dict.fromkeys(range(6), 10), 9)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(backbone, **options):
    return KeepingFederation.of("icarl", CLIENTS, backbone, **{**SMALL, **options})


@pytest.fixture
def one_task(backbone):
    fed = federation(backbone)
    fed.run(TASKS[0])
    return fed


def unit_features(fed, images):
    """Features of the global model, of length 1, in float64."""
    lora = read_parts(fed.hparams, fed.parts()).lora
    view = merged_view(fed.backbone, fed.hparams, lora)
    with torch.no_grad():
        x = cls_features(view, fed.backbone.normalise(to_torch(images.pictures)))
    rows = to_numpy(x).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def herded(phi, most):
    """Algorithm 4, one candidate after the other."""
    mu, kept = phi.mean(axis=0), []
    for k in range(1, most + 1):
        costs = {
            i: np.linalg.norm(mu - (phi[i] + phi[kept].sum(axis=0)) / k)
            for i in range(len(phi))
            if i not in kept
        }
        kept.append(min(costs, key=costs.get))
    return kept


def test_exemplars_are_herded_with_the_global_model_at_the_end_of_a_task(one_task):
    expected = []
    for c in TASKS[0].classes:
        own = CLIENTS[0].of([c])
        every = digests(own)
        expected += [every[i] for i in herded(unit_features(one_task, own), 4)]  # 8 of 2 classes
    assert exemplar_digests(one_task.states[0]) == expected


def test_a_class_keeps_its_first_exemplars_when_others_come(one_task):
    before = exemplar_digests(one_task.states[0])
    one_task.run(TASKS[1])
    after = exemplar_digests(one_task.states[0])
    assert after[:4] == [*before[:2], *before[4:6]]  # 8 of 4 classes: 2 each
    assert len(after) == 8


def test_the_state_holds_digests_and_no_pixel(one_task):
    state = one_task.states[0]
    assert set(state.tensors) == {EXEMPLARS}
    assert state.tensors[EXEMPLARS].shape == (8, 32)


def test_nothing_of_an_exemplar_leaves_but_what_enters_the_means(one_task):
    one_task.open(TASKS[1])
    for kind in ("train", "finish"):
        sent = one_task.upload(kind, 0)
        assert EXEMPLARS not in sent.tensors
        assert sent.i64("n").tolist() == [14]  # new images alone
        assert not any(a.dtype == np.uint8 for a in sent.tensors.values())


def test_means_are_over_all_images_of_new_and_the_exemplars_of_past_classes(one_task):
    one_task.open(TASKS[1])
    one_task.round("train")
    kept = [chosen(c, exemplar_digests(one_task.states[k]), (3, 1)) for k, c in enumerate(CLIENTS)]
    held = [[c.of([5, 4]), again] for c, again in zip(CLIENTS, kept, strict=True)]
    one_task.round("finish")
    part = one_task.parts()[MEANS]
    assert part.i64("classes").tolist() == [3, 1, 5, 4]
    for c, row in zip((3, 1, 5, 4), part.f32("means"), strict=True):
        phi = [unit_features(one_task, x.of([c])) for two in held for x in two if c in x.labels]
        np.testing.assert_allclose(row, np.concatenate(phi).mean(axis=0), rtol=1e-4, atol=1e-5)


def test_a_new_class_may_be_described_by_its_exemplars_alone(backbone):
    fed = federation(backbone, means_from="exemplars", memory=4)
    fed.run(TASKS[0])
    own = CLIENTS[0].of([1])  # the other client has none
    phi = unit_features(fed, own)
    row = fed.parts()[MEANS].f32("means")[1]
    np.testing.assert_allclose(row, phi[herded(phi, 2)].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_the_nearest_mean_of_features_of_length_one_decides(one_task):
    means = one_task.parts()[MEANS].f32("means").astype(np.float64)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    phi = unit_features(one_task, TEST)
    nearest = ((phi[:, None] - means[None]) ** 2).sum(2).argmin(1)
    predictor = one_task.predictor()
    assert predictor.classes == (3, 1)
    assert predictor.logits(TEST.pictures).argmax(1).tolist() == nearest.tolist()


def test_old_classes_are_still_known_after_three_tasks(backbone):
    """Better than without exemplars, and than the same network's head that only distils."""
    with_ = federation(backbone)
    without = Federation.of("icarl", CLIENTS, backbone, **SMALL)
    head = Federation.of(
        "lwf_mc", CLIENTS, backbone, **{k: v for k, v in SMALL.items() if k != "memory"}
    )
    right = []
    for fed in (with_, without, head):
        for task in TASKS:
            fed.run(task)
        old = TEST.of([3, 1, 5, 4])
        predictor = fed.predictor()
        best = np.array(predictor.classes)[predictor.logits(old.pictures).argmax(1)]
        right.append((best == old.labels).mean())
    assert right[0] >= max(right[1], 0.95)
    assert right[0] > right[2] + 0.3


def test_a_client_without_state_trains_and_tells_its_new_classes_alone(one_task):
    one_task.states.clear()
    one_task.open(TASKS[1])
    one_task.round("train")
    assert one_task.upload("finish", 0).i64("owned").tolist() == [5, 4]
    assert len(exemplar_digests(one_task.states[0])) == 8  # 4 of each of its two classes


def test_past_means_stay_where_nobody_has_an_exemplar(one_task):
    before = one_task.parts()[MEANS].f32("means")
    one_task.states.clear()
    one_task.run(TASKS[1])
    after = one_task.parts()[MEANS]
    assert after.i64("classes").tolist() == [3, 1, 5, 4]
    np.testing.assert_array_equal(after.f32("means")[:2], before)


def test_equal_images_are_one_exemplar(backbone):
    own = CLIENTS[0].of([3])
    twice = replace(own, pictures=own.pictures[[0, 0, 1]], labels=own.labels[:3])
    fed = KeepingFederation.of("icarl", [twice], backbone, **SMALL)
    fed.run(TASKS[0])
    assert len(exemplar_digests(fed.states[0])) == 2


def test_told_means_must_be_of_seen_classes_in_order_and_of_enough_images(one_task):
    one_task.open(TASKS[1])
    sent = one_task.upload("finish", 0)
    check = one_task.exchanges[1].check
    for name, value in (
        ("owned", [9, 1, 5, 4]), ("owned", [1, 3, 5, 4]), ("images", [4, 4, 7, 0]),
        ("images", [4, 4, 7, 8]), ("images", [9, 4, 7, 7]), ("means", sent.f32("means") * 1.1),
    ):  # fmt: skip
        told = replace(sent, tensors={**sent.tensors, name: np.array(value)})
        assert len(check(told, TASKS[1])) == 1, name
    assert check(sent, TASKS[1]) == []


def test_two_sets_of_images_are_one():
    both = Joined(CLIENTS[1].of([3]), CLIENTS[0].of([1]))
    assert both.labels.tolist() == [3] * 4 + [1] * 7
    taken = both.take(np.array([5, 0, 10, 3]))
    every = np.concatenate([CLIENTS[1].of([3]).pictures, CLIENTS[0].of([1]).pictures])
    assert np.array_equal(taken, every[[5, 0, 10, 3]])
    assert len(both) == 11
    assert both.size == 16
