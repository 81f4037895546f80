"""Sizes of backbones by name: timm's models and the embedded one agree with what is told."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch

from fcil_adapters.backbones.backbone import load_backbone, timm
from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import BackboneInfo
from fcil_protocol.errors import ConfigError


@pytest.mark.full
def test_timm_agrees():
    """For one of its models of each kind whose sizes are told by name: digits do not matter."""
    told: dict[str, BackboneInfo] = {}
    for name in timm.list_models():
        with suppress(ConfigError):
            told[re.sub(r"\d+", "0", name)] = backbone_by_name(name)
    assert len(told) >= 15
    for info in told.values():
        name = info.name
        with torch.device("meta"):
            module = timm.create_model(name, pretrained=False, num_classes=0)
        block = module.blocks[0]
        assert (info.dim, info.depth) == (module.embed_dim, len(module.blocks)), name
        assert info.heads == block.attn.num_heads, name
        assert info.mlp_dim == block.mlp.fc1.out_features, name
        assert module.cls_token is not None, name


@pytest.mark.parametrize("name", ["embedded", "vit_nano_patch4_32"])
def test_the_embedded_backbone(name):
    told, loaded = backbone_by_name(name), load_backbone().info
    wanted = ("name", "dim", "depth", "heads", "mlp_dim")
    assert [getattr(told, n) for n in wanted] == [getattr(loaded, n) for n in wanted]


def test_tags_do_not_matter():
    assert backbone_by_name("vit_small_patch16_224.dino").dim == 384
    assert backbone_by_name("vit_base_patch16_224.augreg_in21k_ft_in1k").depth == 12


@pytest.mark.parametrize(
    "name",
    [
        "resnet50", "", "vit_base", "vit_base_patch16_18x2_224", "vit_small_patch16_36x1_224",
        "vit_base_patch16_plus_240", "vit_base_patch16_gap_224", "vit_so400m_patch14_siglip_224",
        "vit_base_patch16_dinov3", "vit_giant_patch14_dinov2", "vit_base_patch16_224\nx",
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_known(name):
    with pytest.raises(ConfigError, match="cannot be derived from its name") as caught:
        backbone_by_name(name)
    assert "tiny, small, base, large, huge" in caught.value.action
    assert "embedded" in caught.value.action
