"""The frozen backbone: weights, digest, views, preprocessing, probes, and the timm door."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from adapters.kit import DIM, SIZE, toy_backbone
from fcil_adapters.backbones import backbone as backbones
from fcil_adapters.backbones import probes
from fcil_adapters.backbones.backbone import (
    EMBEDDED_DIGEST,
    backbone_digest,
    cls_features,
    load_backbone,
)
from fcil_adapters.backbones.known import embedded_file
from fcil_adapters.backbones.probes import compare_probes, probe_features, probe_images
from fcil_adapters.images.decoding import decode
from fcil_adapters.numerics.class_means import class_means, class_sums, merge_means
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_protocol.errors import BackboneMismatch, ConfigError, CorruptFile, DataError

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_probe_images.py"


@pytest.fixture(scope="module")
def embedded():
    return load_backbone()


@pytest.fixture
def named(monkeypatch):
    """Let a small ViT pass for a named timm model that has no weights online."""

    def create(name, *, pretrained, num_classes):
        assert name == "vit_tiny_patch16_224"
        if pretrained:
            raise OSError("no route to the hub")
        return backbones.VisionTransformer(
            img_size=SIZE,
            patch_size=8,
            embed_dim=DIM,
            depth=2,
            num_heads=2,
            num_classes=num_classes,
        )

    monkeypatch.setattr(backbones.timm, "create_model", create)
    return "vit_tiny_patch16_224"


class TestEmbedded:
    def test_digest_is_that_of_the_shipped_weights(self, embedded):
        assert embedded.info.digest == EMBEDDED_DIGEST
        assert EMBEDDED_DIGEST == "a92a53a1f90b97217758467236b17fd5012e61699a874b4e9bc736ef9da57a24"

    def test_info_describes_it(self, embedded):
        info = embedded.info
        assert (info.name, info.dim, info.depth, info.heads, info.mlp_dim) == (
            "vit_nano_patch4_32", 128, 6, 4, 512,
        )  # fmt: skip
        assert info.preprocessing.size == 32

    def test_is_frozen_and_in_eval_mode(self, embedded):
        assert not embedded.module.training
        assert not any(p.requires_grad for p in embedded.module.parameters())

    def test_other_weights_of_the_same_shape_can_be_given(self, tmp_path):
        state = {k: v * 2 for k, v in load_backbone().module.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "mine.safetensors")
        other = load_backbone("embedded", tmp_path / "mine.safetensors")
        assert other.info.digest == backbone_digest(state) != EMBEDDED_DIGEST

    def test_damaged_embedded_weights_are_refused(self, monkeypatch):
        monkeypatch.setattr(backbones, "EMBEDDED_DIGEST", "0" * 64)
        with pytest.raises(CorruptFile, match="Install the package again"):
            load_backbone()

    def test_an_unknown_device_is_named(self):
        with pytest.raises(ConfigError, match="'abacus'"):
            load_backbone(device="abacus")

    def test_a_device_of_the_other_engine_names_it(self):
        with pytest.raises(ConfigError, match="--engine onnx"):
            load_backbone(device="tensorrt")


class TestImageSize:
    """A transformer at another image size: only its position embedding is resampled."""

    @pytest.mark.parametrize("size", [16, 20, 48])
    def test_resamples_positions_as_pillow_scales_pictures(self, embedded, size):
        sized, side = load_backbone(image_size=size), size // 4
        own = embedded.module.pos_embed.detach().numpy()[0]  # (1 + 64, d)
        grid = own[1:].reshape(8, 8, -1)
        scaled = np.stack(
            [
                np.asarray(Image.fromarray(plane).resize((side, side), Image.Resampling.BICUBIC))
                for plane in np.ascontiguousarray(grid.transpose(2, 0, 1))
            ],
            axis=-1,
        ).reshape(side * side, -1)
        found = sized.module.pos_embed.detach().numpy()[0]
        np.testing.assert_allclose(found, np.concatenate([own[:1], scaled]), atol=1e-6)
        assert sized.info.preprocessing.size == size
        others = sized.module.state_dict()
        assert all(
            torch.equal(others[n], t)
            for n, t in embedded.module.state_dict().items()
            if n != "pos_embed"
        )

    def test_takes_images_of_that_size(self):
        sized = load_backbone(image_size=16)
        assert sized.features(np.zeros((3, 16, 16, 3), np.uint8)).shape == (3, 128)

    def test_digest_covers_the_size_and_not_the_resampled_bits(self, embedded):
        own = embedded.info.digest
        sizes = {size: load_backbone(image_size=size).info.digest for size in (16, 48)}
        assert len({own, *sizes.values()}) == 3
        words = f"{own} image_size=16".encode()
        assert sizes[16] == hashlib.sha256(words).hexdigest()

    @pytest.mark.parametrize("size", [None, 32])
    def test_its_own_size_changes_nothing(self, embedded, size):
        same = load_backbone(image_size=size)
        assert same.info == embedded.info
        assert same.positions is None

    @pytest.mark.parametrize(
        ("size", "near"), [(30, "28 or 32"), (2, "4 or 8"), (-4, "4 or 8"), (8192, "4092 or 4096")]
    )
    def test_a_size_that_patches_do_not_divide_is_refused(self, size, near):
        with pytest.raises(DataError, match=f"patches of 4.*such as {near}"):
            load_backbone(image_size=size)


class TestDigest:
    def test_depends_on_name_shape_and_values_but_not_on_order_or_dtype(self):
        a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
        digest = backbone_digest({"a": a, "b": b})
        assert backbone_digest({"b": b.half(), "a": a}) == digest
        assert backbone_digest({"a": a, "c": b}) != digest
        assert backbone_digest({"a": a.reshape(3, 2), "b": b}) != digest
        assert backbone_digest({"a": a, "b": b * 2}) != digest


class TestView:
    def test_is_a_new_tree_over_the_same_tensors(self):
        backbone = toy_backbone()
        view = backbone.view()
        ours, theirs = dict(backbone.module.named_parameters()), dict(view.named_parameters())
        assert ours.keys() == theirs.keys()
        assert all(ours[n] is theirs[n] for n in ours)
        view.blocks[0].attn.qkv = torch.nn.Identity()
        assert isinstance(backbone.module.blocks[0].attn.qkv, torch.nn.Linear)

    def test_keeps_what_refers_to_a_module_inside_the_new_tree(self):
        backbone = toy_backbone()
        first, second = backbone.module.blocks
        second.mlp = first.mlp  # in two places
        first.also = [first.norm1]  # where torch does not look
        first.method = second.extra_repr
        seen = []
        first.register_forward_hook(lambda *_: seen.append("hook"))
        view = backbone.view()
        one, two = view.blocks
        assert one.mlp is two.mlp
        assert one.mlp is not first.mlp
        assert one.also == [one.norm1]
        assert one.method.__self__ is two
        assert one.also is not first.also
        view(torch.zeros(1, 3, SIZE, SIZE))
        assert seen == ["hook"]
        assert not view.training

    def test_computes_the_same_features(self):
        backbone = toy_backbone()
        x = backbone.normalise(probe_images(backbone.info))
        assert torch.equal(cls_features(backbone.view(), x), cls_features(backbone.module, x))


class TestFeatures:
    def test_are_the_class_token_after_the_final_norm(self):
        backbone = toy_backbone()
        x = backbone.normalise(probe_images(backbone.info))
        tokens = backbone.module.forward_features(x)  # final norm included
        assert torch.equal(cls_features(backbone.module, x), tokens[:, 0])

    @pytest.mark.parametrize("count", [1, 3, 64])
    def test_and_their_gradients_are_bit_equal_to_those_of_all_tokens(self, count):
        backbone = load_backbone()
        images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
        results = []
        for function in (
            cls_features,
            lambda view, x: view.forward_head(view.forward_features(x), pre_logits=True),
        ):
            x = backbone.normalise(images).requires_grad_()
            features = function(backbone.module, x)
            (features * torch.arange(128).sin()).sum().backward()
            results.append((features.detach(), x.grad))
        (features, gradient), (all_features, all_gradient) = results
        assert torch.equal(features, all_features)
        assert torch.equal(gradient, all_gradient)

    def test_the_last_mlp_runs_for_few_tokens_but_a_hook_sees_all(self):
        backbone = toy_backbone()
        view, sizes = backbone.view(), []
        last = view.blocks[-1]
        last.mlp.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[1]))
        x = torch.zeros(64, 3, SIZE, SIZE)
        with torch.no_grad():
            cls_features(view, x)
            last.register_forward_hook(lambda _module, _x, y: sizes.append(y.shape[1]))
            cls_features(view, x)
        assert sizes == [1, 5, 5]

    def test_normalise_takes_numpy_and_tensors_and_applies_mean_and_std(self):
        backbone = toy_backbone()
        images = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3)).astype(np.uint8)
        x = backbone.normalise(images)
        assert x.shape == (2, 3, SIZE, SIZE)
        expected = (images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
        np.testing.assert_allclose(x.numpy(), expected, atol=1e-6)
        assert torch.equal(backbone.normalise(torch.tensor(images).float()), x)


class TestProbes:
    def test_shipped_pictures_are_those_of_the_script(self):
        drawn = runpy.run_path(str(SCRIPT))["PICTURES"]
        assert tuple(drawn) == probes.PROBES
        for name, draw in drawn.items():
            shipped = decode((probes._FOLDER / name).read_bytes())
            assert shipped.size == (64, 48)
            np.testing.assert_array_equal(np.asarray(shipped), draw())

    def test_the_features_that_the_package_brings_are_those_of_its_backbone(self, embedded):
        """The doctor compares with them; this is how the file was made."""
        shipped = np.load(embedded_file(".probe.npy"))
        assert (shipped.dtype, shipped.shape) == (np.float32, (4, 128))
        assert compare_probes(probe_features(embedded), shipped) < 1e-5

    def test_features_are_finite_and_differ_between_pictures(self, embedded):
        features = probe_features(embedded)
        assert features.shape == (4, 128)
        assert features.dtype == np.float32
        assert np.isfinite(features).all()
        assert len(np.unique(features.round(2), axis=0)) == 4

    def test_comparison_is_the_largest_relative_error(self):
        b = np.array([[3.0, 4.0], [0.0, 1.0]])
        a = b + np.array([[0.0, 0.05], [0.002, 0.0]])
        assert compare_probes(a, b) == pytest.approx(0.01)
        assert compare_probes(b, b) == 0

    def test_comparison_tells_backbones_apart(self):
        one, other = probe_features(toy_backbone(0)), probe_features(toy_backbone(1))
        assert compare_probes(one, other) > 0.1

    def test_values_that_are_not_finite_never_pass(self):
        b = np.ones((4, 3))
        assert compare_probes(np.full((4, 3), np.nan), b) == np.inf

    def test_another_width_is_a_mismatch(self):
        with pytest.raises(BackboneMismatch, match=r"expected shape \(4, 128\), got \(4, 768\)"):
            compare_probes(np.ones((4, 768)), np.ones((4, 128)))


class TestNamedModels:
    def test_local_weights_are_loaded_without_their_head(self, named, tmp_path):
        state = dict(toy_backbone().module.state_dict())
        state |= {"head.weight": torch.zeros(10, DIM), "head.bias": torch.zeros(10)}
        safetensors.torch.save_file(state, tmp_path / "toy.safetensors")
        loaded = load_backbone(named, tmp_path / "toy.safetensors")
        assert loaded.info.digest == toy_backbone().info.digest

    def test_weights_that_do_not_fit_are_listed(self, named, tmp_path):
        state = dict(toy_backbone().module.state_dict())
        del state["cls_token"]
        state |= {"extra": torch.zeros(1), "norm.bias": torch.zeros(3)}
        safetensors.torch.save_file(state, tmp_path / "toy.safetensors")
        with pytest.raises(DataError) as caught:
            load_backbone(named, tmp_path / "toy.safetensors")
        for fault in ("missing cls_token", "unexpected extra", "norm.bias: expected shape (16,)"):
            assert fault in str(caught.value)

    def test_a_file_that_is_no_safetensors_is_refused(self, named, tmp_path):
        (tmp_path / "junk").write_bytes(b"not tensors")
        with pytest.raises(DataError, match="cannot be read as safetensors"):
            load_backbone(named, tmp_path / "junk")

    def test_without_the_hub_the_message_says_what_to_give(self, named):
        with pytest.raises(DataError, match="weights = FILE"):
            load_backbone(named)

    def test_an_unknown_name_gets_the_nearest_known_one(self):
        with pytest.raises(DataError, match="Did you mean 'vit_tiny_patch16_224'"):
            load_backbone("vit_tiny_patch16_225")

    def test_a_model_without_class_token_is_refused(self, monkeypatch):
        def create(*_, **__):
            return backbones.VisionTransformer(
                img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0,
                class_token=False, global_pool="avg",
            )  # fmt: skip

        monkeypatch.setattr(backbones.timm, "create_model", create)
        with pytest.raises(DataError, match="not a plain vision transformer"):
            load_backbone("vit_tiny_patch16_224")


class TestTorchvisionShim:
    def run(self, code: str) -> str:
        done = subprocess.run(  # noqa: PLW1510
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @pytest.mark.full
    def test_declares_operators_only_when_the_import_fails_for_lack_of_them(self):
        """A first import that fails like a CPU-only torch is repaired, and only then."""
        code = """
import importlib, sys, types
from fcil_adapters.backbones import torch_imports as shim
real, failures = importlib.import_module, [RuntimeError("operator torchvision::nms does not exist")]
def fake(name):
    if failures:
        sys.modules["torchvision.half"] = types.ModuleType("torchvision.half")
        raise failures.pop()
    assert "torchvision.half" not in sys.modules
    return types.ModuleType(name)
importlib.import_module = fake
made = []
class Library:
    def __init__(self, *args): made.append(args)
    def define(self, text): made.append(text)
shim.torch.library.Library = Library
print(shim.ensure_torchvision(), len(made), shim.ensure_torchvision(), len(made))
"""
        assert self.run(code) == "True 3 False 3"

    @pytest.mark.full
    def test_another_failure_is_passed_on(self):
        code = """
import importlib
from fcil_adapters.backbones import torch_imports as shim
def fake(name): raise RuntimeError("something else")
importlib.import_module = fake
try:
    shim.ensure_torchvision()
except RuntimeError as error:
    print(error)
"""
        assert self.run(code) == "something else"


class TestBridge:
    def test_read_only_arrays_are_copied(self):
        array = np.arange(4, dtype=np.float32)
        array.setflags(write=False)
        tensor = to_torch(array)
        tensor += 1
        assert array.tolist() == [0, 1, 2, 3]

    def test_bfloat16_and_strided_tensors_become_float32_arrays(self):
        tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).T
        array = to_numpy(tensor)
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_the_array_does_not_share_the_parameters_memory(self):
        parameter = torch.nn.Parameter(torch.zeros(2))
        to_numpy(parameter)[:] = 5
        assert parameter.tolist() == [0, 0]


class TestStatistics:
    def test_sums_add_up_over_batches(self):
        rng = np.random.default_rng(0)
        features, labels = rng.normal(size=(20, 3)), rng.choice([7, 2, 9], 20)
        sums, counts = class_sums(features, labels, (2, 9, 7, 4))
        for row, c in enumerate((2, 9, 7, 4)):
            np.testing.assert_allclose(sums[row], features[labels == c].sum(0))
            assert counts[row] == (labels == c).sum()
        first = class_sums(features[:5], labels[:5], (2, 9, 7, 4))
        rest = class_sums(features[5:], labels[5:], (2, 9, 7, 4))
        np.testing.assert_allclose(first[0] + rest[0], sums)
        assert class_means(sums, counts)[3].tolist() == [0, 0, 0]

    def test_a_label_of_another_task_is_a_key_error(self):
        with pytest.raises(KeyError):
            class_sums(np.zeros((1, 2)), np.array([5]), (1, 2))

    def test_merged_means_are_the_means_over_all_images(self):
        rng = np.random.default_rng(1)
        clients = [(rng.normal(size=(n, 3)), rng.choice([0, 1], n)) for n in (5, 9, 1)]
        parts = [class_sums(f, y, (0, 1, 2)) for f, y in clients]
        means, counts = merge_means(
            np.stack([class_means(*p) for p in parts]), np.stack([p[1] for p in parts])
        )
        features, labels = (np.concatenate(x) for x in zip(*clients, strict=True))
        for c in (0, 1):
            np.testing.assert_allclose(means[c], features[labels == c].mean(0))
        assert means[2].tolist() == [0, 0, 0]
        assert counts.tolist() == [(labels == 0).sum(), (labels == 1).sum(), 0]

    def test_a_capped_client_weighs_at_most_its_share(self):
        means = np.array([[[0.0]], [[1.0]], [[1.0]]])
        counts = np.array([[1000], [1], [1]])
        assert merge_means(means, counts, max_share=0.5)[0][0, 0] == pytest.approx(0.5)
