"""The loss and accuracy of a training, against their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.toolkit.training.optimise import optimise

IMAGES = toy_images({5: 4, 9: 3}, seed=1)
EPOCHS, BATCH = 3, 3


def context(**changes):
    fed = Federation.of("plora", [], blocks=[0])
    fed.task = make_tasks([9, 2, 5])[0]
    return replace(fed.context("train", 1, 4), **changes)


def train(ctx, *, scored=True, lost=None):
    """Train a row of scores per class on mean colours; return weights, batches, what is told."""
    told, batches = [], []
    weight = torch.nn.Parameter(torch.zeros(3, 3))
    sgd = torch.optim.SGD([weight], lr=0.5)

    def objective(batch):
        before = weight.detach().clone()

        def losses(piece):
            scores = piece.pixels.float().mean((1, 2)) / 255 @ weight.T  # (b, 3)
            if scored:
                batch.scored(scores, piece)
            return functional.cross_entropy(scores, piece.rows, reduction="none")

        batch.backward_mean(losses)
        batch.backward(0.1 * weight.square().sum())
        if lost is not None:
            batch.backward(weight.sum() * lost)
        batches.append((before, batch.whole))

    ctx = replace(ctx, trained=told.append)
    optimise(ctx, IMAGES, sgd, objective, epochs=EPOCHS, batch_size=BATCH, view="none")
    return weight.detach(), batches, told


def expected(batches):
    """Loss and accuracy over the images of the last epoch, each by the weights of its step."""
    loss = right = 0.0
    for weight, batch in batches[-math.ceil(len(IMAGES) / BATCH) :]:
        w = weight.double().numpy()
        x = batch.pixels.double().numpy().mean((1, 2)) / 255
        scores, rows = x @ w.T, batch.rows.numpy()
        log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        loss += -log_p[np.arange(len(rows)), rows].sum() + len(rows) * 0.1 * (w**2).sum()
        right += (scores.argmax(1) == rows).sum()
    return loss / len(IMAGES), right / len(IMAGES)


@pytest.mark.parametrize("micro", [None, 2])
def test_they_are_means_over_the_images_of_the_last_epoch(micro):
    _, batches, told = train(context(micro_batch=micro))
    loss, accuracy = expected(batches)
    assert len(told) == 1
    assert told[0].loss == pytest.approx(loss, rel=1e-5)
    assert told[0].accuracy == pytest.approx(accuracy)


def test_a_learner_without_scores_has_a_loss_alone():
    _, batches, told = train(context(), scored=False)
    assert told[0].loss == pytest.approx(expected(batches)[0], rel=1e-5)
    assert told[0].accuracy is None


def test_measuring_changes_no_bit_of_a_training():
    quiet, first, _ = train(context(), scored=False)
    told, second, _ = train(context())
    assert torch.equal(quiet, told)
    assert [b.index.tolist() for _, b in first] == [b.index.tolist() for _, b in second]


def test_a_loss_that_is_no_number_is_not_told():
    assert train(context(), lost=float("nan"))[2] == []


@pytest.mark.parametrize("name", ["fedavg_lora", "pilora", "l2p", "hgp"])
def test_every_family_of_methods_with_gradients_tells_both(name):
    told = []
    fed = Federation.of(name, [toy_images({0: 3, 1: 3})], toy_backbone(), **SMALL[name])
    plain = fed.context
    fed.context = lambda *where: replace(plain(*where), trained=told.append)
    fed.open(make_tasks([0, 1])[0])
    kind = next(e.kind for e in fed.exchanges if e.kind == "train")
    fed.upload(kind, 0)
    assert told
    assert all(np.isfinite(one.loss) and 0 <= one.accuracy <= 1 for one in told)
