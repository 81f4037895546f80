"""LoRA on the q and v columns of a fused qkv Linear, and its attachment to views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adapters.kit import DIM, toy_backbone
from fcil_adapters.backbones.backbone import backbone_digest, cls_features
from fcil_adapters.toolkit.lora.layer import (
    LoRALinear,
    LoraPair,
    attach,
    sum_pairs,
    trained_params,
)

D, R = 6, 2
QKV = ("q", "k", "v")


def pairs(seed: int, d: int = D, r: int = R) -> dict[str, LoraPair]:
    g = torch.Generator().manual_seed(seed)
    return {
        p: LoraPair(torch.randn(r, d, generator=g), torch.randn(d, r, generator=g))
        for p in ("q", "v")
    }


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(D, 3 * D).requires_grad_(False)


@pytest.fixture
def x():
    return torch.randn(3, 5, D, generator=torch.Generator().manual_seed(9))


def explicit(linear, x, delta_q, delta_v):
    """The definition, in float64: W + delta on rows 0:d (q) and 2d:3d (v)."""
    W = linear.weight.double().clone()
    W[:D] += delta_q
    W[2 * D :] += delta_v
    return x.double() @ W.T + linear.bias.double()


def product(pair):
    return pair.B.double() @ pair.A.double()


class TestForward:
    def test_without_pairs_it_is_the_linear_itself(self, linear, x):
        layer = LoRALinear(linear, QKV)
        assert torch.equal(layer(x), linear(x))
        assert layer.weight is linear.weight
        assert layer.trained() == {}

    @pytest.mark.parametrize("scale", [1.0, 0.5])
    def test_current_and_past_pairs_add_their_products(self, linear, x, scale):
        current, past = pairs(1), [pairs(2), pairs(3)]
        layer = LoRALinear(linear, QKV, past=past, current=current, scale=scale)
        delta = {
            p: scale * (product(current[p]) + sum(product(one[p]) for one in past))
            for p in ("q", "v")
        }
        expected = explicit(linear, x, delta["q"], delta["v"])
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)

    def test_an_offset_is_added_before_the_product(self, linear, x):
        current, offset = pairs(1), pairs(2)
        layer = LoRALinear(linear, QKV, current=current, offset=offset)
        delta = {
            p: (offset[p].B + current[p].B).double() @ (offset[p].A + current[p].A).double()
            for p in ("q", "v")
        }
        expected = explicit(linear, x, delta["q"], delta["v"])
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)

    def test_keys_never_change(self, linear, x):
        layer = LoRALinear(linear, QKV, past=[pairs(2)], current=pairs(1))
        assert torch.allclose(layer(x)[..., D : 2 * D], linear(x)[..., D : 2 * D])

    def test_a_fresh_pair_changes_nothing(self, linear, x):
        fresh = {p: LoraPair(pair.A, torch.zeros(D, R)) for p, pair in pairs(1).items()}
        assert torch.equal(LoRALinear(linear, QKV, current=fresh)(x), linear(x))

    def test_sum_pairs_adds_a_and_b_separately(self):
        one, two = pairs(1), pairs(2)
        total = sum_pairs([one, two])["q"]
        expected = (one["q"].B + two["q"].B).double() @ (one["q"].A + two["q"].A).double()
        torch.testing.assert_close(total.product(), expected, rtol=1e-5, atol=1e-6)


class TestGradients:
    def test_only_the_current_pair_gets_a_gradient_and_it_is_exact(self, linear, x):
        current, past = pairs(1), [pairs(2)]
        layer = LoRALinear(linear, QKV, past=past, current=current)
        goal = torch.randn(3, 5, 3 * D, generator=torch.Generator().manual_seed(4))
        (layer(x) * goal).sum().backward()
        leaves = {
            p: (c.A.double().requires_grad_(), c.B.double().requires_grad_())
            for p, c in current.items()
        }
        y = x.double()
        delta_q = y @ leaves["q"][0].T @ leaves["q"][1].T
        delta_v = y @ leaves["v"][0].T @ leaves["v"][1].T
        value = (delta_q * goal[..., :D]).sum() + (delta_v * goal[..., 2 * D :]).sum()
        value.backward()
        for p in ("q", "v"):
            for got, leaf in zip(("A", "B"), leaves[p], strict=True):
                grad = layer.trained()[f"{p}.{got}"].grad.double()
                torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-5)
        assert linear.weight.grad is None

    def test_training_does_not_touch_the_start_values_it_was_given(self, linear, x):
        current = pairs(1)
        before = current["q"].B.clone()
        layer = LoRALinear(linear, QKV, current=current)
        with torch.no_grad():
            layer.trained()["q.B"].add_(1)
        assert torch.equal(current["q"].B, before)


class TestAttach:
    def test_the_backbone_stays_bit_equal_and_views_do_not_see_each_other(self):
        backbone = toy_backbone()
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        plain = cls_features(backbone.module, x)
        adapted, other = backbone.view(), backbone.view()
        attach(adapted, 0, past=[pairs(1, DIM)], current=pairs(2, DIM))
        assert not torch.allclose(cls_features(adapted, x), plain)
        assert torch.equal(cls_features(other, x), plain)
        assert torch.equal(cls_features(backbone.module, x), plain)
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest

    def test_merged_past_equals_the_same_pairs_kept_apart(self):
        backbone = toy_backbone()
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        merged, apart = backbone.view(), backbone.view()
        attach(merged, 1, past=[pairs(1, DIM), pairs(2, DIM)])
        attach(apart, 1, past=[pairs(1, DIM)], current=pairs(2, DIM))
        torch.testing.assert_close(
            cls_features(merged, x), cls_features(apart, x), rtol=1e-4, atol=1e-4
        )

    def test_collector_names_the_trainables_of_all_blocks(self):
        view = toy_backbone().view()
        for block in (0, 1):
            attach(view, block, current=pairs(block, DIM))
        found = trained_params(view, (0, 1))
        assert sorted(found) == [f"{b}.{p}.{m}" for b in (0, 1) for p in "qv" for m in "AB"]
        assert found["0.q.A"].shape == (R, DIM)
        assert found["1.v.B"].shape == (DIM, R)

    def test_collector_fails_if_a_trainable_was_not_declared(self):
        view = toy_backbone().view()
        attach(view, 0, current=pairs(0, DIM))
        view.blocks[1].stray = nn.Parameter(torch.zeros(1))
        with pytest.raises(AssertionError, match="trainables and declarations differ"):
            trained_params(view, (0,))
