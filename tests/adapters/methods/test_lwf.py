"""LwF and FedLwF.MC: their losses by definition, and that what was learned stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.methods.lwf.learner import past_scores
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.client import LoraSetup, Pass, Teacher
from fcil_adapters.toolkit.lora.distillation import SigmoidTargets, softened
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.training.optimise import MicroBatch

SMALL = {
    "rank": 2, "blocks": [0, 1], "epochs": 4, "batch_size": 8, "augment": "none", "lr_lora": 0.05,
    "lr_head": 0.05,
}  # fmt: skip
TASKS = make_tasks([3, 1], [5, 4], [2, 0])
CLIENTS = [toy_images(dict.fromkeys(range(6), 6), seed) for seed in (1, 2)]
TEST = toy_images(dict.fromkeys(range(6), 10), 9)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def second_task(name, backbone, **options):
    """A federation that has begun its second task, its bench, teacher and a batch."""
    fed = Federation.of(name, CLIENTS, backbone, **{**SMALL, **options})
    fed.run(TASKS[0])
    fed.open(TASKS[1])
    fed.round("train")  # so that the model is no longer its teacher
    ctx = fed.context("train")
    received = read_parts(fed.hparams, fed.parts())
    bench, teacher = LoraSetup.of(ctx, received), Teacher.of(ctx, received)
    images = CLIENTS[0].of(TASKS[1].classes)
    first = len(bench.classes) - 2
    rows = first + np.array([TASKS[1].classes.index(c) for c in images.labels])
    piece = MicroBatch(np.arange(len(images)), to_torch(images.pictures).float(), to_torch(rows))
    with torch.no_grad():
        features = bench.features(piece.pixels)
        seen = Pass(piece, features, bench.logits(features), len(images))
    return ctx, received, bench, teacher, seen


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_distillation_is_a_divergence_of_softened_scores(temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 5, 4))
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    expected = temperature**2 * (p * (np.log(p) - np.log(q))).sum()
    found = softened(torch.tensor(student), torch.tensor(teacher), temperature)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert float(softened(torch.tensor(teacher), torch.tensor(teacher), temperature)) == 0
    assert float(softened(torch.tensor(student[:, :1]), torch.tensor(teacher[:, :1]), 2)) == 0


@pytest.mark.parametrize("head_loss", ["current", "all"])
def test_the_student_scores_the_past_classes_alone(head_loss, backbone):
    """With all rows trained its own rows count, with frozen ones those that everybody has."""
    _, received, bench, teacher, seen = second_task("lwf", backbone, head_loss=head_loss)
    rows = {
        int(c): (w, b)
        for t in received.tasks
        for c, w, b in zip(t.classes, t.weight, t.bias, strict=True)
    }
    features = to_numpy(seen.features).astype(np.float64)
    expected = np.stack([features @ rows[c][0] + rows[c][1] for c in TASKS[0].classes], 1)
    assert teacher.classes == TASKS[0].classes
    np.testing.assert_allclose(
        to_numpy(past_scores(bench, teacher, seen)), expected, rtol=1e-4, atol=1e-4
    )


def test_the_teacher_is_the_model_that_ended_the_last_task(backbone):
    fed = Federation.of("lwf", CLIENTS, backbone, **SMALL)
    fed.run(TASKS[0])
    ended = fed.predictor()
    scores = ended.logits(TEST.pictures)
    fed.open(TASKS[1])
    for _ in range(2):
        teacher = Teacher.of(fed.context("train"), read_parts(fed.hparams, fed.parts()))
        assert teacher.classes == ended.classes
        said = to_numpy(teacher.logits(to_torch(TEST.pictures)))
        np.testing.assert_allclose(said, scores, rtol=1e-4, atol=1e-5)
        fed.round("train")


def test_sigmoid_targets_are_one_hot_for_new_and_the_teachers_for_past_classes(backbone):
    ctx, received, bench, teacher, seen = second_task("lwf_mc", backbone)
    loss = SigmoidTargets.of(ctx, bench, received)
    said = to_numpy(teacher.logits(seen.piece.pixels)).astype(np.float64)
    labels = CLIENTS[0].of(TASKS[1].classes).labels
    own = (labels[:, None] == np.array(TASKS[1].classes)).astype(np.float64)
    targets = np.concatenate([1 / (1 + np.exp(-said)), own], 1)  # (b, 4)
    np.testing.assert_allclose(to_numpy(loss.targets(seen)), targets, rtol=1e-5, atol=1e-6)
    p = 1 / (1 + np.exp(-to_numpy(seen.logits).astype(np.float64)))
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum()
    assert float(loss(seen)) == pytest.approx(expected, rel=1e-5)


def test_past_classes_that_nobody_ever_had_are_no_columns_of_the_loss(backbone):
    fed = Federation.of("lwf_mc", [c.of([3, 5, 4]) for c in CLIENTS], backbone, **SMALL)
    fed.run(TASKS[0])
    fed.open(TASKS[1])
    ctx, received = fed.context("train"), read_parts(fed.hparams, fed.parts())
    bench = LoraSetup.of(ctx, received)
    loss = SigmoidTargets.of(ctx, bench, received)
    assert bench.classes == (3, 1, 5, 4)
    assert (loss.past.tolist(), loss.own.tolist()) == ([0], [2, 3])
    fed.round("train")
    assert np.isfinite(fed.predictor().logits(TEST.pictures)).all()


def apart(fed, task):
    """Share of a task's test images that its own classes tell apart."""
    predictor, images = fed.predictor(), TEST.of(task.classes)
    columns = np.isin(predictor.classes, task.classes)
    best = predictor.logits(images.pictures)[:, columns].argmax(axis=1)
    return (np.array(predictor.classes)[columns][best] == images.labels).mean()


def learned(name, backbone, **options):
    fed = Federation.of(name, CLIENTS, backbone, **{**SMALL, **options})
    for task in TASKS:
        fed.run(task, rounds=2)
    return fed


def test_lwf_still_tells_old_classes_apart_where_averages_alone_no_longer_do(backbone):
    with_, without = (
        learned("lwf", backbone, head_loss="all", alpha=alpha) for alpha in (1.0, 0.0)
    )
    kept, lost = (np.mean([apart(f, t) for t in TASKS[:2]]) for f in (with_, without))
    assert lost < 0.75
    assert kept > lost + 0.2


def test_without_distillation_lwf_is_fedavg_lora_to_the_bit(backbone):
    ours, theirs = (
        learned(name, backbone, **options)
        for name, options in (("lwf", {"alpha": 0.0}), ("fedavg_lora", {}))
    )
    for name, array in theirs.state.tensors.items():
        assert np.array_equal(ours.state.tensors[name], array), name
