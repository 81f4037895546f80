"""Prototype distances and losses, augmentation, evaluation: the small shared pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adapters.kit import Images
from fcil_adapters.toolkit.heads.distances import (
    draw_linear,
    mean_row,
    prototype_distances,
    prototype_losses,
    squared_distances,
)
from fcil_adapters.toolkit.training import augment as augmentation
from fcil_adapters.toolkit.training.augment import augment
from fcil_adapters.worker.evaluation import evaluate, predict


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestDistances:
    @pytest.fixture
    def points(self):
        return torch.randn(5, 8, generator=generator(1)) * 3, torch.randn(
            4, 8, generator=generator(2)
        )

    @pytest.mark.parametrize("name", ["rms", "sq", "sq_over_d"])
    def test_equal_the_definition_in_float64(self, points, name):
        f, m = points
        got = prototype_distances(f, m, name)
        for b in range(5):
            for c in range(4):
                sq = float((f[b].double() - m[c].double()).square().sum())
                expected = {"rms": math.sqrt(sq / 8), "sq": sq, "sq_over_d": sq / 8}[name]
                assert float(got[b, c]) == pytest.approx(expected, rel=1e-5)

    def test_all_variants_have_the_same_nearest_prototype(self, points):
        f, m = points
        nearest = [
            prototype_distances(f, m, n).argmin(1).tolist() for n in ("rms", "sq", "sq_over_d")
        ]
        assert nearest[0] == nearest[1] == nearest[2]

    def test_a_feature_on_its_prototype_has_a_finite_gradient(self):
        """The square root's slope is infinite at 0, and the expanded form may fall below 0."""
        f = (1000 * torch.randn(3, 64, generator=generator())).requires_grad_()
        distances = prototype_distances(f, f.detach().clone(), "rms")
        distances.sum().backward()
        assert torch.isfinite(f.grad).all()
        assert (distances >= 1e-6).all()
        assert (squared_distances(f, f.detach()) >= 0).all()


class TestLosses:
    @pytest.mark.parametrize("delta", [1.0, 7.5])
    def test_equal_the_definition_in_float64(self, delta):
        D = torch.rand(6, 3, generator=generator()) * 4
        y = torch.tensor([0, 1, 2, 2, 1, 0])
        dce, pull = prototype_losses(D, y, delta)
        for i in range(6):
            e = [math.exp(-delta * float(v)) for v in D[i]]
            assert float(dce[i]) == pytest.approx(-math.log(e[y[i]] / sum(e)), rel=1e-5, abs=1e-6)
            assert float(pull[i]) == pytest.approx(float(D[i, y[i]]))

    def test_one_prototype_gives_zero_cross_entropy_and_no_gradient(self):
        D = torch.rand(4, 1, generator=generator()).requires_grad_()
        dce, _ = prototype_losses(D, torch.zeros(4, dtype=torch.int64), 1.0)
        dce.sum().backward()
        assert dce.tolist() == [0, 0, 0, 0]
        assert D.grad.tolist() == [[0], [0], [0], [0]]


class TestMeanRow:
    def test_points_to_the_mean_and_is_as_long_as_past_rows_are_on_average(self):
        row = mean_row(np.array([3.0, 4.0]), np.array([[0, 2], [4, 0], [0, -6]], np.float32))
        np.testing.assert_allclose(row, [0.6 * 4, 0.8 * 4], rtol=1e-12)

    def test_of_several_means_sets_each_ones_length(self):
        means = np.random.default_rng(0).normal(size=(3, 2, 5))
        rows = mean_row(means, np.full((2, 5), 1.0, np.float32))
        expected = means / np.linalg.norm(means, axis=-1, keepdims=True) * math.sqrt(5)
        np.testing.assert_allclose(rows, expected, rtol=1e-12)

    def test_has_length_one_without_past(self):
        row = mean_row(np.array([0.0, -7.0], np.float32), np.zeros((0, 2), np.float32))
        assert row.tolist() == [0, -1]

    def test_of_a_mean_of_zeros_is_zero(self):
        assert not mean_row(np.zeros(4), np.zeros((0, 4))).any()


def test_drawn_rows_are_those_of_a_fresh_linear_layer():
    weight, bias = draw_linear(np.random.default_rng(0), 400, 16)
    assert (weight.shape, bias.shape) == ((400, 16), (400,))
    for values in (weight, bias):
        assert np.abs(values).max() <= 0.25
        assert values.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.1)


class TestAugment:
    @pytest.fixture
    def images(self):
        return torch.randint(0, 256, (64, 8, 8, 3), generator=generator(3), dtype=torch.uint8)

    @pytest.mark.parametrize("name", ["flip_jitter", "jitter", "crop_flip", "none"])
    def test_keeps_shape_and_range_and_follows_its_generator_alone(self, images, name):
        torch.manual_seed(1)
        one = augment(images, name, generator(5))
        torch.manual_seed(2)
        assert torch.equal(augment(images, name, generator(5)), one)
        assert one.dtype == torch.float32
        assert one.shape == images.shape
        assert one.min() >= 0
        assert one.max() <= 255
        assert torch.equal(augment(images, name, generator(6)), one) == (name == "none")

    def test_none_changes_nothing(self, images):
        assert torch.equal(augment(images, "none", generator()), images.float())

    def test_about_half_of_the_images_are_mirrored_and_none_otherwise_changed(self, images):
        view = augmentation.flip(images.float(), generator(1))
        same = (view == images).flatten(1).all(1)
        mirrored = (view == images.flip(2)).flatten(1).all(1)
        assert (same ^ mirrored).all()
        assert 16 < int(mirrored.sum()) < 48

    def test_brightness_draws_one_factor_per_image_within_its_range(self):
        grey = torch.full((64, 4, 4, 3), 100, dtype=torch.uint8)
        view = augment(grey, "jitter", generator(1)) / 100
        assert torch.equal(view.amin((1, 2, 3)), view.amax((1, 2, 3)))
        factor = view[:, 0, 0, 0]
        assert len(factor.unique()) == 64
        assert factor.min() >= 1 - 63 / 255 - 1e-6
        assert factor.max() <= 1 + 63 / 255 + 1e-6

    def test_bright_pixels_are_clipped(self):
        white = torch.full((64, 2, 2, 3), 255, dtype=torch.uint8)
        assert augment(white, "jitter", generator(1)).max() == 255

    def test_a_crop_shows_a_part_at_a_larger_scale(self):
        """On a horizontal ramp a crop is a ramp again, less steep, inside the old range."""
        ramp = torch.arange(32.0).expand(64, 32, 32)[..., None].expand(-1, -1, -1, 3) * 8
        view = augmentation.crop(ramp, generator(1))
        slope = view[:, 16, 20, 0] - view[:, 16, 12, 0]  # 8 pixels apart; 64 in the whole picture
        assert (slope > 0).all()
        assert (slope <= 64 + 1e-3).all()
        assert (slope < 50).sum() > 16
        assert view.min() >= 0
        assert view.max() <= 248

    def test_a_batch_of_one_works(self, images):
        assert augment(images[:1], "crop_flip", generator()).shape == (1, 8, 8, 3)


class ByRedValue:
    """Scores pictures by their first pixel: red value v is class ``classes[v]``."""

    def __init__(self, *classes: int) -> None:
        self.classes = classes

    def logits(self, images):
        return np.eye(len(self.classes), dtype=np.float32)[images[:, 0, 0, 0]]


class Flat:
    """Cannot tell anything apart."""

    classes = (8, 3)

    def logits(self, images):
        return np.zeros((len(images), 2), dtype=np.float32)


def reds(*values: int, labels: list[int]) -> Images:
    pictures = np.zeros((len(values), 2, 2, 3), dtype=np.uint8)
    pictures[:, 0, 0, 0] = values
    return Images(pictures, np.array(labels, dtype=np.int64))


class TestEvaluate:
    @pytest.mark.parametrize("batch", [1, 2, 256])
    def test_counts_right_answers_by_class_for_any_batch(self, batch):
        images = reds(0, 1, 1, 2, 0, labels=[5, 3, 5, 9, 5])
        classes, correct, total = evaluate(ByRedValue(5, 3, 9), images, batch)
        assert classes.tolist() == [3, 5, 9]
        assert correct.tolist() == [1, 2, 1]
        assert total.tolist() == [1, 3, 1]

    def test_the_lower_column_wins_a_tie(self):
        assert predict(Flat(), np.zeros((2, 2, 2, 3), np.uint8)).tolist() == [8, 8]

    def test_labels_that_are_no_candidate_count_as_wrong(self):
        classes, correct, total = evaluate(ByRedValue(5, 3), reds(0, 1, labels=[7, 3]))
        assert (classes.tolist(), correct.tolist(), total.tolist()) == ([3, 7], [1, 0], [1, 1])

    def test_without_candidates_everything_is_wrong(self):
        _, correct, total = evaluate(ByRedValue(), reds(0, labels=[1]))
        assert (correct.tolist(), total.tolist()) == ([0], [1])

    def test_no_images_give_no_classes(self):
        assert [len(x) for x in evaluate(Flat(), reds(labels=[]))] == [0, 0, 0]
