"""A client's passes over its images, piece by piece, without any method."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, make_tasks, toy_images
from fcil_adapters.contract import Context
from fcil_adapters.toolkit.heads.scorer import Scorer
from fcil_adapters.toolkit.training.augment import augment
from fcil_adapters.toolkit.training.optimise import (
    FeatureSums,
    class_counts,
    optimise,
    schedule_factor,
    shuffled_batches,
    sum_features,
)
from fcil_protocol.errors import DataError, WorkerError

IMAGES = toy_images({5: 4, 9: 3}, seed=1)


@pytest.fixture(scope="module")
def ctx() -> Context:
    fed = Federation.of("plora", [], blocks=[0])
    fed.task = make_tasks([9, 2, 5])[0]
    return fed.context("train", 1, 4)


def red(pixels: torch.Tensor) -> torch.Tensor:
    """A feature of each image (b, 16): its mean colour, repeated."""
    return pixels.float().mean((1, 2, 3))[:, None].expand(-1, 16)


def seen_by(ctx, data, objective, *, epochs=2, batch_size=3, view="none", **more):
    """The batches that an objective is called with."""
    batches = []
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def noting(batch):
        batches.append(batch)
        objective(batch)

    optimise(
        ctx, data, sgd, noting, epochs=epochs, batch_size=batch_size, view=view, **more
    )  # fmt: skip
    return batches


def nothing(batch):
    batch.backward(torch.zeros((), requires_grad=True))


class TestBatches:
    @pytest.mark.parametrize("view", ["flip_jitter", "crop_flip", "none"])
    @pytest.mark.parametrize("micro", [None, 1, 2, 99])
    def test_are_those_of_one_generator_used_in_order_cut_into_pieces(self, ctx, view, micro):
        context = replace(ctx, micro_batch=micro)
        batches = seen_by(context, IMAGES, nothing, view=view)
        draws = torch.Generator().manual_seed(ctx.torch_seed(1))
        expected = []
        for index in shuffled_batches(7, epochs=2, batch_size=3, generator=draws):
            pixels = augment(torch.tensor(IMAGES.take(index)), view, draws)
            expected.append((index, pixels))
        assert len(batches) == len(expected) == 6
        for batch, (index, pixels) in zip(batches, expected, strict=True):
            pieces = list(batch.pieces())
            assert np.concatenate([p.index for p in pieces]).tolist() == index.tolist()
            assert torch.equal(torch.cat([p.pixels for p in pieces]), pixels)
            rows = [0 if IMAGES.labels[i] == 9 else 2 for i in index]
            assert torch.cat([p.rows for p in pieces]).tolist() == rows
            assert max(len(p.pixels) for p in pieces) == min(micro or 3, len(index))

    def test_the_next_one_is_made_while_one_is_worked_on_and_none_after_it(self, ctx):
        made = threading.Semaphore(0)

        class Telling:
            labels, size = IMAGES.labels, IMAGES.size
            taken, threads = 0, set()

            def __len__(self):
                return len(IMAGES)

            def take(self, index):
                self.taken += 1
                self.threads.add(threading.current_thread())
                made.release()
                return IMAGES.take(index)

        data = Telling()
        ahead_by = []

        def objective(batch):
            done = len(ahead_by)
            for _ in range(2 if not done else int(done < 5)):
                assert made.acquire(timeout=60)
            ahead_by.append(data.taken - done - 1)
            nothing(batch)

        seen_by(ctx, data, objective)
        assert ahead_by == [1, 1, 1, 1, 1, 0]
        assert threading.current_thread() not in data.threads
        assert not any(thread.is_alive() for thread in data.threads)

    def test_an_image_that_cannot_be_read_is_an_error_of_the_step_that_needs_it(self, ctx):
        class Breaking(type(IMAGES)):
            def take(self, index):
                if 6 in index:
                    raise DataError("gone")
                return super().take(index)

        seen = []
        with pytest.raises(DataError, match="gone"):
            seen_by(ctx, Breaking(IMAGES.pictures, IMAGES.labels), lambda b: seen.append(nothing(b)),
                    batch_size=1, epochs=1)  # fmt: skip
        draws = torch.Generator().manual_seed(ctx.torch_seed(1))
        order = [int(i[0]) for i in shuffled_batches(7, epochs=1, batch_size=1, generator=draws)]
        assert len(seen) == order.index(6)

    def test_an_objective_that_fails_ends_the_thread_that_loads(self, ctx):
        def failing(_batch):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            seen_by(ctx, IMAGES, failing)
        assert not [t for t in threading.enumerate() if t.name.startswith("ahead")]


class TestOptimise:
    def test_steps_once_per_batch_and_shows_every_image_once_per_epoch(self, ctx):
        told, seen = [], []
        weight = torch.nn.Parameter(torch.zeros(1))

        def objective(batch):
            assert weight.grad is None or not weight.grad.any()  # of the batch before
            batch.backward(weight.sum())
            batch.backward(torch.full((), float(len(batch)), requires_grad=True))
            seen.append(batch.whole.index.tolist())

        sgd = torch.optim.SGD([weight], lr=1.0)
        with_progress = replace(ctx, progress=told.append)
        optimise(with_progress, IMAGES, sgd, objective, epochs=2, batch_size=3, view="none")
        assert [len(batch) for batch in seen] == [3, 3, 1, 3, 3, 1]
        first, second = (sum(seen[i : i + 3], []) for i in (0, 3))
        assert sorted(first) == sorted(second) == list(range(7))
        assert first != second
        assert weight.item() == -6
        assert [(p.done, p.total, p.loss) for p in told] == [
            (i + 1, 6, len(batch) - i) for i, batch in enumerate(seen)
        ]

    def test_a_factor_scales_the_first_step_sizes_of_every_group(self, ctx):
        used = []
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 3.0)]
        sgd = torch.optim.SGD(groups)

        def objective(batch):
            used.append([group["lr"] for group in sgd.param_groups])

        optimise(
            ctx, IMAGES, sgd, objective, epochs=2, batch_size=3, view="none",
            factor=lambda step, steps: (steps - step) / 2,
        )  # fmt: skip
        assert used == [[f, 3 * f] for f in (3.0, 2.5, 2.0, 1.5, 1.0, 0.5)]

    def test_draws_from_the_contexts_seed_alone(self, ctx):
        def drawn(context):
            batches = seen_by(context, IMAGES, nothing, batch_size=2, view="jitter")
            return [(b.whole.index.tolist(), b.whole.pixels.sum().item()) for b in batches]

        torch.manual_seed(1)
        one = drawn(ctx)
        torch.manual_seed(2)
        assert drawn(ctx) == one
        assert drawn(replace(ctx, seed=(9,))) != one
        assert drawn(replace(ctx, round=2)) != one

    def test_a_gradient_is_cut_to_the_norm(self, ctx):
        weight = torch.nn.Parameter(torch.zeros(2))
        sgd = torch.optim.SGD([weight], lr=1.0)

        def objective(batch):
            batch.backward((weight * torch.tensor([30.0, 40.0])).sum())

        optimise(
            ctx, IMAGES, sgd, objective, epochs=1, batch_size=7, view="none", clip_norm=0.5
        )  # fmt: skip
        np.testing.assert_allclose(weight.detach(), [-0.3, -0.4], rtol=1e-5)

    @pytest.mark.parametrize("clip_norm", [None, 0.5])
    def test_scaled_losses_give_the_same_step(self, ctx, clip_norm):
        """fp16 on a GPU without bf16; gradients of the size of 1e-8 would vanish in it."""

        def trained(precision):
            weight = torch.nn.Parameter(torch.ones(2))
            sgd = torch.optim.SGD([weight], lr=0.25)
            backbone = copy.copy(ctx.backbone)
            backbone.precision = precision
            scales = []

            def objective(batch):
                scales.append(batch.scaler and batch.scaler.get_scale())
                batch.backward(weight.square().sum())

            told = []
            context = replace(ctx, backbone=backbone, progress=told.append)
            optimise(
                context, IMAGES, sgd, objective, epochs=1, batch_size=3, view="none",
                clip_norm=clip_norm,
            )  # fmt: skip
            return weight.detach(), [p.loss for p in told], scales

        plain, losses, none = trained("fp32")
        scaled, same, scales = trained("fp16")
        assert none == [None] * 3
        assert scales == [1024] * 3, "not so large that the first steps of each round overflow"
        torch.testing.assert_close(scaled, plain)
        assert same == pytest.approx(losses)

    @pytest.mark.parametrize("clip_norm", [None, 0.5])
    def test_a_round_whose_steps_all_overflow_is_no_update(self, ctx, clip_norm):
        """A step that overflows is left out; as long as one was made, the round counts."""

        def trained(overflowing):
            weight = torch.nn.Parameter(torch.ones(2))
            sgd = torch.optim.SGD([weight], lr=0.25)
            backbone = copy.copy(ctx.backbone)
            backbone.precision = "fp16"
            factors = iter([float("inf")] * overflowing + [1.0] * 3)
            optimise(
                replace(ctx, backbone=backbone), IMAGES, sgd,
                lambda batch: batch.backward((weight * next(factors)).sum()),
                epochs=1, batch_size=3, view="none", clip_norm=clip_norm,
            )  # fmt: skip
            return weight.detach()

        step = 0.25 if clip_norm is None else 0.25 * 0.5 / 2**0.5
        assert trained(2).tolist() == pytest.approx([1 - step] * 2)
        with pytest.raises(WorkerError, match="overflowed in all 3 steps") as caught:
            trained(3)
        assert "--precision fp32" in caught.value.action


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
