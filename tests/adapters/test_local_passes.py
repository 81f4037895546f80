"""A client's passes over its images, piece by piece, without any method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, make_tasks, toy_images
from fcil_adapters.augment import augment
from fcil_adapters.contract import Context
from fcil_adapters.local_passes import (
    FeatureSums,
    class_counts,
    micro_batches,
    optimise,
    schedule_factor,
    sum_features,
)
from fcil_adapters.scoring import Scorer

IMAGES = toy_images({5: 4, 9: 3}, seed=1)


@pytest.fixture(scope="module")
def ctx() -> Context:
    fed = Federation.of("plora", [], blocks=[0])
    fed.task = make_tasks([9, 2, 5])[0]
    return fed.context("train", 1, 4)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def red(pixels: torch.Tensor) -> torch.Tensor:
    """A feature of each image (b, 16): its mean colour, repeated."""
    return pixels.float().mean((1, 2, 3))[:, None].expand(-1, 16)


class TestMicroBatches:
    @pytest.mark.parametrize("view", ["flip_jitter", "crop_flip", "none"])
    @pytest.mark.parametrize("micro", [None, 1, 2, 99])
    def test_are_the_batchs_views_cut_into_pieces(self, ctx, view, micro):
        index = np.array([6, 0, 3, 5, 1])
        pieces = list(micro_batches(replace(ctx, micro_batch=micro), IMAGES, index, view,
                                    generator()))  # fmt: skip
        whole = augment(torch.tensor(IMAGES.take(index)), view, generator())
        assert torch.equal(torch.cat([pixels for pixels, _ in pieces]), whole)
        assert torch.cat([rows for _, rows in pieces]).tolist() == [0, 2, 2, 0, 2]
        assert max(len(pixels) for pixels, _ in pieces) == min(micro or 5, 5)


class TestOptimise:
    def test_steps_once_per_batch_and_shows_every_image_once_per_epoch(self, ctx):
        told, seen = [], []
        weight = torch.nn.Parameter(torch.zeros(1))

        def objective(index, _generator):
            assert weight.grad is None or not weight.grad.any()  # of the batch before
            weight.grad = torch.ones(1)
            seen.append(index.tolist())
            return float(len(index))

        sgd = torch.optim.SGD([weight], lr=1.0)
        with_progress = replace(ctx, progress=told.append)
        optimise(with_progress, IMAGES, sgd, objective, epochs=2, batch_size=3)
        assert [len(batch) for batch in seen] == [3, 3, 1, 3, 3, 1]
        first, second = (sum(seen[i : i + 3], []) for i in (0, 3))
        assert sorted(first) == sorted(second) == list(range(7))
        assert first != second
        assert weight.item() == -6
        assert [(p.done, p.total, p.loss) for p in told] == [
            (i + 1, 6, len(batch)) for i, batch in enumerate(seen)
        ]

    def test_a_factor_scales_the_first_step_sizes_of_every_group(self, ctx):
        used = []
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 3.0)]
        sgd = torch.optim.SGD(groups)

        def objective(_index, _generator):
            used.append([group["lr"] for group in sgd.param_groups])
            return 0.0

        optimise(
            ctx, IMAGES, sgd, objective, epochs=2, batch_size=3,
            factor=lambda step, steps: (steps - step) / 2,
        )  # fmt: skip
        assert used == [[f, 3 * f] for f in (3.0, 2.5, 2.0, 1.5, 1.0, 0.5)]

    def test_draws_from_the_contexts_seed_alone(self, ctx):
        def order(context):
            batches = []
            sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

            def objective(index, batch_generator):
                batches.append((index.tolist(), torch.rand(1, generator=batch_generator).item()))
                return 0.0

            optimise(context, IMAGES, sgd, objective, epochs=1, batch_size=2)
            return batches

        torch.manual_seed(1)
        one = order(ctx)
        torch.manual_seed(2)
        assert order(ctx) == one
        assert order(replace(ctx, seed=(9,))) != one
        assert order(replace(ctx, round=2)) != one


class TestSchedule:
    @pytest.mark.parametrize(
        ("name", "factors"),
        [
            ("cosine", [1, 0.853553, 0.5, 0.146447]),
            ("cosine_repeat", [1, 1, 0.853553, 0.5]),
            ("constant", [1, 1, 1, 1]),
        ],
    )
    def test_factors_of_four_rounds(self, name, factors):
        got = [schedule_factor(name, e, 4) for e in range(4)]
        assert got == pytest.approx(factors, abs=1e-6)


class TestSums:
    @pytest.mark.parametrize("micro", [None, 2])
    def test_are_those_of_each_class_over_all_images(self, ctx, micro):
        told = []
        context = replace(ctx, micro_batch=micro, progress=told.append)
        sums = sum_features(context, red, IMAGES, batch_size=3, report=True)
        assert sums.counts.tolist() == class_counts(IMAGES, (9, 2, 5)).tolist() == [3, 0, 4]
        colour = IMAGES.pictures.astype(np.float64).mean((1, 2, 3))
        for row, c in ((0, 9), (2, 5)):
            np.testing.assert_allclose(
                sums.means[row], colour[IMAGES.labels == c].mean(), rtol=1e-6
            )
        assert not sums.means[1].any()
        assert [p.done for p in told] == ([3, 6, 7] if micro is None else [2, 4, 6, 7])

    def test_add_up_when_a_class_comes_twice_in_a_batch(self):
        sums = FeatureSums.zero(2, 1)
        sums.add(np.array([[1.0], [2.0], [4.0]]), np.array([1, 0, 1]))
        sums.add(np.array([[8.0]]), np.array([1]))
        assert sums.sums.tolist() == [[2], [13]]
        assert sums.counts.tolist() == [1, 3]


@pytest.mark.parametrize(("micro", "sizes"), [(None, [7]), (3, [3, 3, 1]), (99, [7])])
def test_a_scorer_scores_in_micro_batches_without_a_gradient(micro, sizes):
    seen = []

    def score(pixels):
        seen.append(len(pixels))
        assert not torch.is_grad_enabled()
        return red(pixels)[:, :2]

    scorer = Scorer((4, 8), score, micro)
    got = scorer.logits(IMAGES.pictures)
    assert seen == sizes
    np.testing.assert_allclose(got, red(torch.tensor(IMAGES.pictures))[:, :2].numpy(), rtol=1e-6)
    assert scorer.logits(IMAGES.pictures[:0]).shape == (0, 2)
