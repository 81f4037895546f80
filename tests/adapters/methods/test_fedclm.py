"""FedCLM: class means of the finished model, and nothing else, decide."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.lora_reference import features, parameters
from fcil_protocol.payloads.payload import pack

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [toy_images({0: 6, 1: 2, 5: 2}, 1), toy_images({0: 1, 5: 3}, 2),
           toy_images({1: 4, 4: 2}, 3)]  # fmt: skip
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 2, "lr_head": 0.1, "lr_lora": 0.5, "augment": "none"}
IMAGES = toy_images({0: 3, 1: 2, 5: 3, 4: 3}, 9)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(backbone, **kw) -> Federation:
    return Federation.of("fedclm", CLIENTS, backbone, **{**FAST, **kw})


def means_now(fed, classes) -> dict[int, np.ndarray]:
    """Mean features over all clients' images, under the model of this moment, in float64."""
    values = parameters(fed.parts())
    found = {}
    for c in classes:
        own = [features(fed.backbone, values, x.of([c])) for x in CLIENTS if c in x.labels]
        if own:
            stacked = np.concatenate([f.detach().numpy() for f in own])
            found[c] = stacked.mean(0)
    return found


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_nearest_mean_wins_and_old_means_are_those_of_their_tasks_end(backbone, metric):
    fed = federation(backbone, metric=metric)
    means = {}
    for task in TASKS:
        fed.run(task, rounds=2)
        means |= means_now(fed, task.classes)
    assert list(means) == [0, 1, 5, 4]
    f = features(backbone, parameters(fed.parts()), IMAGES).detach().numpy()
    rows = np.stack(list(means.values()))
    if metric == "euclidean":
        expected = -np.square(f[:, None] - rows[None]).sum(2)
    else:
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (f, rows)]
        expected = unit[0] @ unit[1].T
    predictor = fed.predictor()
    assert predictor.classes == tuple(means)
    np.testing.assert_allclose(predictor.logits(IMAGES.pictures), expected, atol=2e-3)
    stale = means_now(fed, TASKS[0].classes)
    assert max(np.abs(stale[c] - means[c]).max() for c in stale) > 1e-2, "LoRA went on"


def test_with_frozen_lora_it_is_fedncm(backbone):
    both = [federation(backbone, lr_lora=0.0),
            Federation.of("fedncm", CLIENTS, backbone, metric="euclidean")]  # fmt: skip
    for task in TASKS:
        for fed in both:
            fed.run(task)
    ours, theirs = (fed.predictor() for fed in both)
    assert ours.classes == theirs.classes
    np.testing.assert_array_equal(*(p.logits(IMAGES.pictures).argmax(1) for p in (ours, theirs)))
    known = theirs.logits(IMAGES.pictures)
    np.testing.assert_allclose(
        np.ptp(ours.logits(IMAGES.pictures), axis=1), np.ptp(known, axis=1), rtol=1e-3
    )


def test_a_task_is_no_candidate_before_its_end_and_its_end_changes_no_weight(backbone):
    fed = federation(backbone)
    fed.run(TASKS[0])
    fed.open(TASKS[1])
    fed.round("train")
    assert fed.predictor().classes == (0, 1)
    before = fed.parts()
    fed.round("finish")
    after = fed.parts()
    changed = {n for n in after if n not in before or pack(after[n]) != pack(before[n])}
    assert changed == {"means/1"}
    assert fed.predictor().classes == (0, 1, 5, 4)


def test_means_of_few_images_stay_at_home(backbone):
    fed = federation(backbone, min_count_upload=3)
    fed.run(TASKS[0])
    fed.open(TASKS[1])
    sent = fed.upload("finish", 0).tensors
    assert sent["owned"].tolist() == []
    assert sent["count"].tolist() == [2, 0]
    fed.round("train")
    fed.round("finish")
    assert fed.predictor().classes == (0, 1, 5)  # only client 1 has three images, of class 5
