"""The method in one process: a server and its clients as plain calls."""

import numpy as np
import pytest
from thumbnail_lda import METHOD, check_upload
from thumbnail_lda.features import areas, thumbnails

from adapters.kit import SIZE, Federation, Images, make_tasks, toy_backbone, toy_images
from fcil_adapters.export.exported_model import ExportedModel, Origin
from fcil_adapters.export.model_file import export_model
from fcil_protocol.payloads.payload import Payload

ALONE = toy_images({0: 20, 1: 9, 2: 1, 3: 12, 4: 8}, 1)
OTHER = toy_images({0: 4, 2: 30, 4: 5}, 2)
TASKS = make_tasks([1, 0], [2], [3, 4])  # the second task has one class


def learn(*clients, tasks=TASKS, **options):
    federation = Federation(METHOD, METHOD.hparams(**options), toy_backbone(), clients)
    for task in tasks:
        federation.run(task)
    return federation


def together(*clients):
    return Images(
        np.concatenate([c.pictures for c in clients]), np.concatenate([c.labels for c in clients])
    )


def test_it_tells_the_classes_of_all_tasks_apart():
    test = toy_images(dict.fromkeys(range(5), 20), 3)
    predictor = learn(ALONE, OTHER).predictor()
    best = predictor.logits(test.pictures).argmax(axis=1)
    assert (np.array(predictor.classes)[best] == test.labels).mean() > 0.95


def test_two_clients_learn_what_one_with_all_images_learns():
    apart, pooled = learn(ALONE, OTHER).state, learn(together(ALONE, OTHER)).state
    for name, tensor in pooled.tensors.items():
        np.testing.assert_allclose(apart.tensors[name], tensor, atol=1e-6, err_msg=name)


def test_the_covariance_is_that_of_all_images_around_the_means_of_their_classes():
    images = together(ALONE, OTHER)
    small = thumbnails(images.pictures, areas(SIZE, 4))
    apart = [small[images.labels == c] for c in range(5)]
    centred = np.concatenate([x - x.mean(axis=0) for x in apart])
    expected = np.cov(centred.T, bias=True)
    state = learn(ALONE, OTHER, side=4).state
    np.testing.assert_allclose(state.f32("cov"), expected, atol=1e-6)
    assert state.i64("n").tolist() == [len(images)]


def test_with_all_weight_on_the_identity_the_nearest_mean_wins():
    predictor = learn(ALONE, OTHER, shrinkage=1.0).predictor()
    images = toy_images({0: 3, 2: 3, 4: 3}, 5)
    small = thumbnails(images.pictures, areas(SIZE, 8))
    pool = together(ALONE, OTHER)
    means = [
        thumbnails(pool.of([c]).pictures, areas(SIZE, 8)).mean(axis=0) for c in predictor.classes
    ]
    nearest = np.square(small[:, None] - np.array(means)).sum(axis=2).argmin(axis=1)
    assert (predictor.logits(images.pictures).argmax(axis=1) == nearest).all()


def test_a_class_that_nobody_has_is_no_candidate():
    predictor = learn(toy_images({0: 5, 3: 2}), toy_images({})).predictor()
    assert set(predictor.classes) == {0, 3}
    assert predictor.logits(ALONE.pictures).shape == (len(ALONE), 2)


@pytest.mark.full
def test_the_exported_file_scores_as_the_model_does(tmp_path):
    federation = learn(ALONE, OTHER)
    ctx, parts, file = federation.context("evaluate"), federation.parts(), tmp_path / "model.onnx"
    origin = Origin("federation", "run", task=2, state=1, names={0: "ant"})
    info = export_model(METHOD, ctx, parts, origin, file, images=ALONE.pictures)
    assert info.checked.agreement == 1
    scores = ExportedModel.load(file, "cpu").logits(OTHER.pictures)
    right = federation.predictor().logits(OTHER.pictures)
    np.testing.assert_allclose(scores, right, rtol=1e-4)


def test_who_was_away_in_the_first_exchange_sends_no_scatter_of_a_class_without_mean():
    federation = Federation(METHOD, METHOD.hparams(), toy_backbone(), [toy_images({0: 5})])
    federation.open(TASKS[0])
    federation.round("prepare")
    federation.clients = [toy_images({0: 2, 1: 6})]
    sent = federation.upload("train", 0)
    assert sent.i64("count").tolist() == [0, 2]  # of the classes 1 and 0


@pytest.mark.parametrize(("n", "faults"), [(3, 0), (4, 1)])
def test_counts_that_contradict_each_other_are_a_fault(n, faults):
    sent = Payload({"n": np.array([n]), "count": np.array([1, 2])})
    assert len(check_upload(sent, TASKS[0])) == faults
