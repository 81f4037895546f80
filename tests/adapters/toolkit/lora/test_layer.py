"""Adapters on the Linears of a block, beside a dense change of the frozen weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adapters.kit import DIM, toy_backbone
from fcil_adapters.backbones.backbone import backbone_digest, cls_features
from fcil_adapters.toolkit.lora.layer import LoRALinear, LoraPair, attach, trained_params
from fcil_protocol.errors import DataError

SHAPES = {"q": (DIM, DIM), "v": (DIM, DIM), "fc1": (4 * DIM, DIM), "fc2": (DIM, 4 * DIM)}


def pairs(modules=tuple(SHAPES), seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        m: LoraPair(
            0.3 * torch.randn(2, SHAPES[m][1], generator=g),
            0.3 * torch.randn(SHAPES[m][0], 2, generator=g),
        )
        for m in modules
    }


def changes(modules=tuple(SHAPES), seed=1):
    g = torch.Generator().manual_seed(seed)
    return {m: 0.1 * torch.randn(SHAPES[m], generator=g).double() for m in modules}


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


@pytest.fixture(scope="module")
def x():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))


class TestLayer:
    def test_every_slice_gets_its_change_and_product(self):
        linear = nn.Linear(4, 6)
        pair = LoraPair(torch.randn(2, 4), torch.randn(2, 2))
        D = torch.randn(2, 4).double()
        layer = LoRALinear(linear, ("q", "k", "v"), change={"v": D}, current={"q": pair}, scale=0.5)
        W = linear.weight.double().clone()
        W[:2] += 0.5 * pair.product()
        W[4:] += D
        x = torch.randn(5, 4)
        expected = x.double() @ W.T + linear.bias.double()
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)

    def test_without_change_the_weight_is_the_linears_own(self):
        linear = nn.Linear(4, 4)
        layer = LoRALinear(linear, ("fc1",), change={}, current={})
        assert layer.weight is linear.weight
        x = torch.randn(2, 4)
        assert torch.equal(layer(x), linear(x))

    def test_a_frozen_a_is_no_trainable(self):
        linear = nn.Linear(4, 4).requires_grad_(False)
        pair = {"fc1": LoraPair(torch.randn(2, 4), torch.zeros(4, 2))}
        layer = LoRALinear(linear, ("fc1",), change={}, current=pair, train="B")
        assert sorted(layer.trained()) == ["fc1.B"]
        layer(torch.randn(2, 4)).sum().backward()
        assert layer.pairs["fc1"]["A"].grad is None

    def test_a_frozen_b_is_no_trainable_either(self):
        linear = nn.Linear(4, 4).requires_grad_(False)
        pair = {"fc1": LoraPair(torch.randn(2, 4), torch.randn(4, 2))}
        layer = LoRALinear(linear, ("fc1",), current=pair, train="A")
        assert sorted(layer.trained()) == ["fc1.A"]
        layer(torch.randn(2, 4)).sum().backward()
        assert layer.pairs["fc1"]["B"].grad is None


class TestAttach:
    def test_training_and_merged_views_agree(self, backbone, x):
        training, merged = backbone.view(), backbone.view()
        for block in (0, 1):
            change, current = changes(seed=block), pairs(seed=block)
            attach(training, block, change=change, current=current, scale=0.7)
            sums = {m: change[m] + 0.7 * current[m].product() for m in SHAPES}
            attach(merged, block, change=sums, current={})
        one, two = cls_features(training, x), cls_features(merged, x)
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
        assert (one - cls_features(backbone.module, x)).abs().max() > 0.01
        assert len(trained_params(training, (0, 1))) == 16
        assert trained_params(merged, (0, 1)) == {}

    def test_the_backbone_stays_bit_equal(self, backbone, x):
        view = backbone.view()
        attach(view, 0, change=changes(), current=pairs())
        cls_features(view, x).sum().backward()
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest
        assert all(p.grad is None for p in backbone.module.parameters())

    def test_only_the_named_modules_are_replaced(self, backbone):
        view = backbone.view()
        attach(view, 1, change={}, current=pairs(("fc2",)))
        assert sorted(trained_params(view, (0, 1))) == ["1.fc2.A", "1.fc2.B"]
        assert isinstance(view.blocks[1].mlp.fc1, nn.Linear)
        assert isinstance(view.blocks[1].attn.qkv, nn.Linear)

    def test_qkv_as_one_module_is_its_three_slices_side_by_side(self, backbone, x):
        whole, slices = backbone.view(), backbone.view()
        g = torch.Generator().manual_seed(3)
        pair = LoraPair(torch.randn(2, DIM, generator=g), torch.randn(3 * DIM, 2, generator=g))
        attach(whole, 0, current={"qkv": pair})
        thirds = zip("qkv", pair.B.chunk(3), strict=True)
        attach(slices, 0, change={m: LoraPair(pair.A, B).product() for m, B in thirds})
        assert sorted(trained_params(whole, (0,))) == ["0.qkv.A", "0.qkv.B"]
        one, two = cls_features(whole, x), cls_features(slices, x)
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)

    def test_the_projection_of_the_attention_is_a_module(self, backbone, x):
        view, expected = backbone.view(), copy.deepcopy(backbone.module)
        pair = pairs(("q",))["q"]  # of the same shape
        attach(view, 1, current={"proj": pair})
        with torch.no_grad():
            expected.blocks[1].attn.proj.weight += pair.product().float()
        torch.testing.assert_close(
            cls_features(view, x), cls_features(expected, x), atol=1e-4, rtol=1e-4
        )

    def test_another_shape_is_named(self, backbone):
        with pytest.raises(DataError, match=r"mlp\.fc1 has shape \(16, 16\)"):
            attach(backbone.view(), 0, change={"fc1": torch.zeros(DIM, DIM)}, current={})

    def test_a_trainable_that_no_layer_declares_is_our_bug(self, backbone):
        view = backbone.view()
        attach(view, 0, change={}, current=pairs())
        view.blocks[1].mlp.fc1.weight = nn.Parameter(torch.zeros(4 * DIM, DIM))
        with pytest.raises(AssertionError, match="differ"):
            trained_params(view, (0, 1))
