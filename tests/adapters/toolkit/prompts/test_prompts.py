"""Prefix tuning against attention written out head by head, selection against its sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.hgp_reference import frozen_features, mixed, normalised, prompted_feature
from adapters.kit import DIM, SIZE, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import (
    VisionTransformer,
    backbone_digest,
    cls_features,
    wrap_backbone,
)
from fcil_adapters.contract import Preprocessing
from fcil_adapters.toolkit.prompts.prefix import (
    PromptedView,
    Queries,
    query_features,
    select,
    with_pixels,
)
from fcil_protocol.errors import DataError

IMAGES = toy_images({0: 2, 1: 3}, seed=3)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestPromptedView:
    @pytest.mark.parametrize("blocks", [(0,), (1,), (0, 1)])
    @pytest.mark.parametrize("length", [2, 6])
    def test_first_half_goes_before_keys_and_last_half_before_values(
        self, backbone, blocks, length
    ):
        prompts = {b: draw(5, length, DIM, seed=b) for b in blocks}
        f = PromptedView(backbone, blocks).forward(backbone.normalise(IMAGES.pictures), prompts)
        for i, picture in enumerate(normalised(IMAGES)):
            own = {b: p[i].double().numpy() for b, p in prompts.items()}
            np.testing.assert_allclose(f[i], prompted_feature(backbone, picture, own), atol=2e-5)

    def test_without_a_prompt_the_features_are_the_frozen_ones(self, backbone):
        x = backbone.normalise(IMAGES.pictures)
        f = PromptedView(backbone, (0, 1)).forward(x, {})
        assert torch.equal(f, cls_features(backbone.module, x))

    def test_a_prompt_of_zeros_is_not_nothing(self, backbone):
        x = backbone.normalise(IMAGES.pictures)
        f = PromptedView(backbone, (0,)).forward(x, {0: torch.zeros(5, 4, DIM)})
        assert (f - cls_features(backbone.module, x)).abs().max() > 1e-2

    def test_prompts_do_not_outlive_their_pass(self, backbone):
        x, view = backbone.normalise(IMAGES.pictures), PromptedView(backbone, (0,))
        before = view.forward(x, {})
        view.forward(x, {0: draw(5, 4, DIM)})
        assert torch.equal(view.forward(x, {}), before)
        with pytest.raises(RuntimeError):
            view.forward(x, {0: draw(4, 4, DIM)})  # four prompts for five images
        assert torch.equal(view.forward(x, {}), before)

    def test_gradients_reach_the_prompts_and_nothing_else(self, backbone):
        prompt = draw(5, 4, DIM).requires_grad_()
        view = PromptedView(backbone, (1,))
        view.forward(backbone.normalise(IMAGES.pictures), {1: prompt}).sum().backward()
        assert prompt.grad.abs().min() > 0
        assert all(p.grad is None for p in backbone.module.parameters())

    def test_the_backbone_stays_bit_equal_and_unhooked(self, backbone):
        PromptedView(backbone, (0, 1)).forward(
            backbone.normalise(IMAGES.pictures), {0: draw(5, 4, DIM)}
        )
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest
        assert type(backbone.module.blocks[0].attn).__name__ == "Attention"

    def test_attention_with_norms_of_its_own_is_refused(self):
        module = VisionTransformer(
            img_size=SIZE, patch_size=8, embed_dim=DIM, depth=1, num_heads=2, num_classes=0,
            qk_norm=True,
        )  # fmt: skip
        wrapped = wrap_backbone(module, "odd", Preprocessing(SIZE, (0.5,) * 3, (0.5,) * 3))
        with pytest.raises(DataError, match="'odd' has norms or gates"):
            PromptedView(wrapped, (0,))


class TestPixels:
    def test_in_the_unit_range_have_neither_mean_nor_deviation(self, backbone):
        plain = with_pixels(backbone, "unit")
        expected = normalised(IMAGES, unit=True)
        np.testing.assert_allclose(plain.normalise(IMAGES.pictures), expected, atol=1e-6)
        q = query_features(plain, IMAGES.pictures)
        np.testing.assert_allclose(q, frozen_features(backbone, IMAGES, unit=True), atol=2e-5)
        assert plain.module is backbone.module

    def test_as_pre_trained_are_the_backbones_own(self, backbone):
        assert with_pixels(backbone, "normalised") is backbone


class TestSelect:
    @pytest.mark.parametrize("score", ["cosine", "softmax"])
    def test_is_the_weighted_sum_over_the_pool(self, score):
        query, keys, pool = draw(4, DIM), draw(3, DIM, seed=1), draw(3, 6, DIM, seed=2)
        chosen = select(query, keys, pool, score)
        tensors = [{"key.x": keys.numpy(), "prompt.x": pool.numpy()}]
        for i in range(4):
            expected = mixed(query[i].double().numpy(), tensors, "x", score)
            np.testing.assert_allclose(chosen[i], expected, atol=1e-5)

    def test_leading_dimensions_are_clients(self):
        query, keys, pool = draw(4, DIM), draw(2, 3, DIM, seed=1), draw(2, 3, 6, DIM, seed=2)
        chosen = select(query, keys, pool)
        assert chosen.shape == (2, 4, 6, DIM)
        for k in range(2):
            torch.testing.assert_close(chosen[k], select(query, keys[k], pool[k]))

    def test_a_query_of_zeros_gives_no_nan(self):
        assert torch.isfinite(select(torch.zeros(1, DIM), draw(3, DIM), draw(3, 2, DIM))).all()


class TestQueries:
    def test_are_features_of_the_frozen_model(self, backbone):
        expected = frozen_features(backbone, IMAGES)
        for micro in (None, 2):
            q = query_features(backbone, IMAGES.pictures, micro)
            np.testing.assert_allclose(q, expected, atol=2e-5)

    def test_canonical_ones_ignore_the_view_and_are_computed_once(self, backbone):
        class Counting:
            labels, size, taken = IMAGES.labels, SIZE, 0

            def __len__(self):
                return len(IMAGES)

            def take(self, index):
                self.taken += len(index)
                return IMAGES.take(index)

        data = Counting()
        queries = Queries(backbone, data, "canonical", batch=2)
        index = np.array([3, 1])
        dark = torch.zeros(2, SIZE, SIZE, 3)
        for _ in range(3):
            q = queries.of(index, dark)
        np.testing.assert_allclose(q, frozen_features(backbone, IMAGES)[index], atol=2e-5)
        assert data.taken == len(IMAGES)

    def test_of_plain_images_they_are_computed_once_per_backbone_and_kind_of_pixels(self):
        backbone, passes = toy_backbone(), []
        backbone.alive = lambda: passes.append(1)
        first = Queries(backbone, IMAGES, "canonical", batch=2)
        assert len(passes) == -(-len(IMAGES) // 2)
        passes.clear()
        again = Queries(backbone, IMAGES, "canonical", batch=3)
        index = np.arange(len(IMAGES))
        assert torch.equal(again.of(index, None), first.of(index, None))
        assert torch.equal(query_features(backbone, torch.tensor(IMAGES.pictures)),
                           first.of(index, None))  # fmt: skip
        assert not passes
        unit = with_pixels(backbone, "unit")
        other = Queries(unit, IMAGES, "canonical", batch=99).of(index, None)
        assert (other - first.of(index, None)).abs().max() > 1e-3
        assert len(passes) == 1
        Queries(unit, IMAGES, "canonical", batch=99)
        assert len(passes) == 1

    def test_those_of_views_follow_the_view(self, backbone):
        queries = Queries(backbone, IMAGES, "view", batch=2)
        dark = torch.zeros(2, SIZE, SIZE, 3)
        q = queries.of(np.array([3, 1]), dark)
        assert torch.equal(q, query_features(backbone, dark))
        assert torch.equal(q[0], q[1])

    def test_no_images(self, backbone):
        none = IMAGES.of([])
        assert Queries(backbone, none, "canonical", 4).of(
            np.zeros(0, np.int64), torch.zeros(0, SIZE, SIZE, 3)
        ).shape == (0, DIM)
