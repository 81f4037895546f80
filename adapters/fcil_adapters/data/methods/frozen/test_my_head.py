"""The method in one process: a server and its clients as plain calls."""

import numpy as np
from fcil_adapters.testing import (
    ToyFederation,
    ToyImages,
    make_tasks,
    toy_backbone,
    toy_images,
)

from my_head import METHOD
from my_head.model import variance

ALONE = toy_images({0: 20, 1: 9, 2: 1, 3: 12, 4: 8}, seed=1)
OTHER = toy_images({0: 4, 2: 30, 4: 5}, seed=2)
TASKS = make_tasks([1, 0], [2], [3, 4])  # the second task has one class


def learn(*clients, **options):
    hparams = METHOD.hparams(**options)
    federation = ToyFederation(METHOD, hparams, toy_backbone(), clients)
    for task in TASKS:
        federation.run(task)
    return federation


def together(*clients):
    return ToyImages(
        np.concatenate([c.pictures for c in clients]),
        np.concatenate([c.labels for c in clients]),
    )


def test_it_tells_the_classes_of_all_tasks_apart():
    test = toy_images(dict.fromkeys(range(5), 20), seed=3)
    predictor = learn(ALONE, OTHER).predictor()
    best = predictor.logits(test.pictures).argmax(axis=1)
    assert (np.array(predictor.classes)[best] == test.labels).mean() > 0.9


def test_two_clients_learn_what_one_with_all_images_learns():
    apart, pooled = learn(ALONE, OTHER).state, learn(together(ALONE, OTHER)).state
    for name, tensor in pooled.tensors.items():
        np.testing.assert_allclose(
            apart.tensors[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name
        )


def test_the_variance_is_that_around_the_means_of_the_classes():
    federation, images = learn(ALONE, OTHER), together(ALONE, OTHER)
    features = federation.backbone.features(images.pictures).astype(np.float64)
    apart = [features[images.labels == c] for c in range(5)]
    centred = np.concatenate([x - x.mean(axis=0) for x in apart])
    told = variance(list(federation.parts().values()))
    np.testing.assert_allclose(told, np.square(centred).mean(axis=0), atol=1e-5)


def test_with_full_shrinkage_the_nearest_mean_wins():
    federation = learn(ALONE, OTHER, shrinkage=1.0)
    predictor, images = federation.predictor(), toy_images({0: 3, 2: 3, 4: 3}, seed=5)
    parts = federation.parts().values()
    means = np.concatenate([part.f32("mean") for part in parts])
    features = federation.backbone.features(images.pictures)
    nearest = np.square(features[:, None] - means).sum(axis=2).argmin(axis=1)
    assert (predictor.logits(images.pictures).argmax(axis=1) == nearest).all()


def test_a_class_that_nobody_has_is_no_candidate():
    predictor = learn(toy_images({0: 5, 3: 2}), toy_images({})).predictor()
    assert set(predictor.classes) == {0, 3}
    assert predictor.logits(ALONE.pictures).shape == (len(ALONE), 2)
