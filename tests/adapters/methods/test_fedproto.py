"""FedProto: prototypes and pull by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import cls_features
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.methods.fedproto.learner import Pull
from fcil_adapters.methods.fedproto.parts import read_prototypes
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.client import LoraSetup, Pass
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.tensors import lora_of
from fcil_adapters.toolkit.lora.views import merged_view
from fcil_adapters.toolkit.training.optimise import MicroBatch

SMALL = {"rank": 2, "blocks": [0, 1], "epochs": 1, "batch_size": 4, "augment": "none"}
TASKS = make_tasks([3, 1], [5, 4])
CLIENTS = [toy_images({3: 4, 1: 2, 5: 3}, 1), toy_images({1: 3, 5: 1}, 2)]


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


@pytest.fixture
def fed(backbone):
    fed = Federation.of("fedproto", CLIENTS, backbone, **SMALL)
    fed.open(TASKS[0])
    return fed


def features(backbone, h, lora, images):
    view = merged_view(backbone, h, lora)
    with torch.no_grad():
        return to_numpy(cls_features(view, backbone.normalise(to_torch(images.pictures)))).astype(
            np.float64
        )


def test_a_client_sends_the_class_means_of_its_own_trained_model(fed, backbone):
    sent = fed.upload("train", 0)
    assert sent.i64("owned").tolist() == [3, 1]
    for row, c in zip(sent.f32("proto"), (3, 1), strict=True):
        mean = features(backbone, fed.hparams, lora_of(sent), CLIENTS[0].of([c])).mean(axis=0)
        np.testing.assert_allclose(row, mean, rtol=1e-4, atol=1e-5)


def test_global_prototypes_are_means_over_all_images_of_a_class(fed):
    sent = [fed.upload("train", k) for k in range(2)]
    fed.round("train")
    classes, rows = read_prototypes(fed.parts())
    assert classes == (3, 1)
    np.testing.assert_allclose(rows[0], sent[0].f32("proto")[0], rtol=1e-6)
    expected = (2 * sent[0].f32("proto")[1] + 3 * sent[1].f32("proto")[0]) / 5
    np.testing.assert_allclose(rows[1], expected, rtol=1e-5)


def test_the_pull_is_the_mean_squared_way_from_each_batch_mean_to_its_prototype(fed):
    fed.round("train")
    ctx, parts = fed.context("train"), fed.parts()
    bench = LoraSetup.of(ctx, read_parts(fed.hparams, parts))
    classes, rows = read_prototypes(parts)
    rng = np.random.default_rng(0)
    batch, labels = rng.normal(size=(5, rows.shape[1])), np.array([1, 0, 1, 1, 0])
    piece = MicroBatch(np.arange(5), torch.zeros(5, 1), to_torch(labels))
    seen = Pass(piece, torch.tensor(batch, dtype=torch.float32), torch.zeros(5, 2), 5)
    expected = sum(((batch[labels == c].mean(0) - rows[c]) ** 2).mean() for c in (0, 1))
    pull = Pull.of(bench, TASKS[0].classes, classes, rows)
    assert float(pull(seen)) == pytest.approx(expected, rel=1e-5)
    one = MicroBatch(np.arange(1), torch.zeros(1, 1), to_torch(labels[:1]))
    alone = replace(seen, piece=one, features=seen.features[:1])
    assert float(pull(alone)) == pytest.approx(((batch[0] - rows[1]) ** 2).mean(), rel=1e-5)
    none = Pull.of(bench, TASKS[0].classes, (), rows[:0])
    assert float(none(seen)) == 0


def test_a_class_that_nobody_had_this_round_keeps_its_prototype_and_past_ones_stay(fed):
    fed.round("train")
    before = dict(zip(*read_prototypes(fed.parts()), strict=True))
    fed.clients = [CLIENTS[1], CLIENTS[1]]
    fed.round("train")
    after = dict(zip(*read_prototypes(fed.parts()), strict=True))
    assert np.array_equal(after[3], before[3])
    assert not np.array_equal(after[1], before[1])
    fed.run(TASKS[1])
    last = dict(zip(*read_prototypes(fed.parts()), strict=True))
    assert set(last) == {3, 1, 5}
    assert np.array_equal(last[1], after[1])


def test_the_nearest_prototype_decides_where_it_is_asked_to(backbone):
    fed = Federation.of("fedproto", CLIENTS, backbone, **SMALL, inference="prototypes")
    fed.run(TASKS[0])
    images = CLIENTS[0].of([3, 1])
    classes, rows = read_prototypes(fed.parts())
    lora = read_parts(fed.hparams, fed.parts()).lora
    f = features(backbone, fed.hparams, lora, images)
    nearest = ((f[:, None] - rows[None]) ** 2).sum(2).argmin(1)
    predictor = fed.predictor()
    assert predictor.classes == classes
    assert predictor.logits(images.pictures).argmax(1).tolist() == nearest.tolist()


def test_with_noise_means_come_from_the_model_of_the_broadcast(fed, backbone):
    """No bound holds for a model that was trained on the same images."""
    fed.privacy = Privacy(1e-12, 1e6, draw=np.zeros)
    sent = fed.upload("train", 0)
    lora = read_parts(fed.hparams, fed.parts()).lora
    mean = features(backbone, fed.hparams, lora, CLIENTS[0].of([3])).mean(axis=0)
    np.testing.assert_allclose(sent.f32("proto")[0], mean, rtol=1e-4, atol=1e-5)


def test_a_mean_of_too_few_images_stays_at_home(backbone):
    fed = Federation.of("fedproto", CLIENTS, backbone, **SMALL, min_count_upload=3)
    fed.open(TASKS[0])
    sent = fed.upload("train", 0)
    assert sent.i64("owned").tolist() == [3]
    told = {**sent.tensors, "owned": np.array([1])}
    assert fed.exchanges[0].check(replace(sent, tensors=told), TASKS[0]) != []
