"""scripts/pretrain: the terms of the loss, resuming to the bit, the card, and bad input."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pretraining import card, checkpoint, command, targets, terms, training, transfer
from pretraining import learner as learner_module
from pretraining.answers import Answers, depths
from pretraining.learner import batches, features, normalised
from pretraining.pictures import CIFAR100, Pictures, check_disjoint, plain, read_pictures
from pretraining.recipe import Recipe
from pretraining.training import CHECKPOINT, Sitting
from pretraining.views import turn, view
from safetensors.torch import load_file, save_file

from fcil_adapters.backbones.backbone import cls_features, load_backbone, wrap_backbone
from fcil_adapters.backbones.known import embedded_file
from fcil_adapters.backbones.onnx_backbone import load_onnx_backbone
from fcil_adapters.backbones.probes import probe_features
from fcil_protocol.errors import ConfigError, CorruptFile, DataError

torch.set_num_threads(1)

TOY = {
    "img_size": 16, "patch_size": 4, "embed_dim": 8, "depth": 5, "num_heads": 2, "mlp_ratio": 2,
    "num_classes": 0,
}  # fmt: skip
ALL = Recipe(
    steps=6, batch=4, dino=1.0, classes=1.0, spread=0.1, layers=0.5, keep=0.5, whole_after=0.6,
    small=2, outputs=16, momentum=0.9, warm_teacher=0.5, warmup=0.3,
)  # fmt: skip
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain"


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def pictures(rng):
    images = rng.integers(0, 256, (14, 16, 16, 3), dtype=np.uint8)
    return Pictures(images, np.repeat([0, 1], 7), ("left", "right"), "d" * 64)


def doubles(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def quiet(folder, **options):
    return Sitting(folder, tell=lambda _: None, **options)


def softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


class TestDino:
    def test_loss_is_the_cross_entropy_of_all_pairs_of_different_views(self, rng):
        student, teacher = doubles(rng, 4, 3, 5), doubles(rng, 2, 3, 5)  # views, B, K
        centre = doubles(rng, 5)
        expected = []
        for t in range(2):
            for s in range(4):
                if s == t:
                    continue
                for b in range(3):
                    target = softmax((teacher[t, b].numpy() - centre.numpy()) / 0.04)
                    expected.append(-(target * np.log(softmax(student[s, b].numpy() / 0.1))).sum())
        loss = terms.dino_loss(list(student), list(teacher), centre, (0.1, 0.04))
        assert float(loss) == pytest.approx(np.mean(expected), rel=1e-12)

    def test_centre_is_a_moving_mean_of_the_teachers_outputs(self, rng):
        centre, teacher = doubles(rng, 5), doubles(rng, 2, 3, 5)
        moved = terms.moved_centre(centre, list(teacher), 0.9)
        expected = 0.9 * centre.numpy() + 0.1 * teacher.numpy().reshape(6, 5).mean(0)
        np.testing.assert_allclose(moved.numpy(), expected, rtol=1e-12)

    def test_teacher_follows_the_student_and_never_learns_by_itself(self, pictures):
        learner, _ = training.begin(replace(ALL, momentum=0.75), pictures, TOY, None, "cpu")
        before = [p.clone() for p in learner.teacher.parameters()]
        learner.learn(*(torch.from_numpy(a[:4]) for a in (pictures.images, pictures.labels)))
        pairs = zip(before, learner.student.parameters(), learner.teacher.parameters(), strict=True)
        for old, new, now in pairs:
            assert not torch.equal(old, new)
            torch.testing.assert_close(now, 0.75 * old + 0.25 * new)

    def test_centre_of_a_learner_moves_with_the_teachers_outputs(self, pictures):
        learner, _ = training.begin(ALL, pictures, TOY, None, "cpu")
        learner.learn(*(torch.from_numpy(a[:4]) for a in (pictures.images, pictures.labels)))
        # Rows and points have unit length: a tenth of a mean of cosines.
        assert 0 < float(learner.centre.abs().max()) <= 0.1


class TestSchedules:
    def test_rate_grows_linearly_then_falls_by_a_cosine_to_nothing(self):
        recipe = Recipe(steps=110, dino=1.0, lr=2.0, warmup=10 / 110)
        assert [recipe.rate(s) for s in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
        assert [recipe.rate(s) for s in (10, 60, 110)] == pytest.approx([2.0, 1.0, 0.0])

    def test_momentum_of_the_teacher_goes_from_its_start_to_one_by_a_cosine(self):
        recipe = Recipe(steps=100, dino=1.0, momentum=0.9)
        expected = [1 - 0.1 * (math.cos(math.pi * s / 100) + 1) / 2 for s in (0, 25, 50, 100)]
        assert [recipe.teacher_momentum(s) for s in (0, 25, 50, 100)] == pytest.approx(expected)

    def test_teachers_temperature_rises_linearly_and_stays(self):
        recipe = Recipe(steps=100, dino=1.0, teacher_temperature=0.08, warm_teacher=0.2)
        assert [recipe.sharpness(s) for s in (0, 10, 20, 99)] == pytest.approx(
            [0.04, 0.06, 0.08, 0.08]
        )

    def test_order_of_the_images_depends_on_the_step_alone(self):
        recipe = replace(ALL, steps=9)
        everything = [rows.tolist() for rows in batches(14, recipe, 0)]
        assert [rows.tolist() for rows in batches(14, recipe, 5)] == everything[5:]
        assert sorted(sum(everything[:3], [])) == sorted(set(sum(everything[:3], [])))
        assert everything[:3] != everything[3:6]


class TestSpread:
    def test_is_barlow_twins_on_features_of_equal_length_that_are_not_centred(self, rng):
        a, b = rng.standard_normal((2, 6, 3))
        za, zb = (x / np.linalg.norm(x, axis=1, keepdims=True) * math.sqrt(3) for x in (a, b))
        c = za.T @ zb / 6
        expected = sum(
            (1 - c[i, j]) ** 2 if i == j else 5e-3 * c[i, j] ** 2
            for i in range(3)
            for j in range(3)
        )
        loss = terms.spread_loss(torch.from_numpy(a), torch.from_numpy(b))
        assert float(loss) == pytest.approx(expected, rel=1e-12)


class TestAnswers:
    def test_answers_have_the_root_of_the_blocks_spread_in_their_main_directions(self, rng):
        seen = [doubles(rng, 40, 4) @ doubles(rng, 4, 4) for _ in range(3)]
        teacher = Answers(12, 4).double()
        teacher.fit(seen, seen[-1], 4, 0.5)
        x = np.hstack([(s / (s - s.mean(0)).square().sum(1).mean().sqrt()).numpy() for s in seen])
        values = np.linalg.svd(x - x.mean(0), compute_uv=False)[:4] / math.sqrt(40)
        answers = teacher(seen).numpy()
        np.testing.assert_allclose(answers.mean(0), 0, atol=1e-12)
        spread = np.linalg.eigvalsh(answers.T @ answers / 40)[::-1]
        np.testing.assert_allclose(spread, values, rtol=1e-9)

    def test_no_turn_of_the_answers_lies_nearer_to_the_features(self, rng):
        seen = [doubles(rng, 40, 4) for _ in range(3)]
        teacher = Answers(12, 4).double()
        teacher.fit(seen, seen[-1], 4, 0.5)
        agreement = teacher(seen).T @ seen[-1]
        # Procrustes: the best turn leaves a symmetric matrix without negative eigenvalues.
        torch.testing.assert_close(agreement, agreement.T)
        assert float(torch.linalg.eigvalsh(agreement).min()) > 0

    def test_last_of_the_depths_is_the_feature(self, rng):
        vit = training.new_model(TOY, 0)
        x = torch.from_numpy(rng.random((2, 3, 16, 16), dtype=np.float32))
        *others, last = depths(vit, x)
        assert len(others) == 2
        torch.testing.assert_close(last, vit(x))


class TestViews:
    def test_feature_is_that_of_the_backbone_that_ships(self, rng):
        backbone = load_backbone()
        images = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
        x = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
        torch.testing.assert_close(normalised(x), backbone.normalise(images))
        expected = cls_features(backbone.module, backbone.normalise(images))
        torch.testing.assert_close(features(backbone.module, normalised(x)), expected)

    def test_patches_that_are_left_out_change_nothing(self):
        vit = training.new_model(TOY, 0)
        dice = torch.Generator().manual_seed(1)
        left = torch.rand(1, 16, generator=dice).argsort(1)[0, 8:]  # what keep = 0.5 leaves out
        x = torch.rand(1, 3, 16, 16)
        y = x.clone().unflatten(2, (4, 4)).unflatten(4, (4, 4))  # (1, 3, row, 4, column, 4)
        y[:, :, left // 4, :, left % 4] = 0.0
        y = y.flatten(4, 5).flatten(2, 3)
        assert not torch.equal(features(vit, x), features(vit, y))
        seen = [features(vit, z, 0.5, torch.Generator().manual_seed(1)) for z in (x, y)]
        torch.testing.assert_close(*seen)

    def test_small_views_give_features_too(self):
        vit = training.new_model(TOY, 0)
        assert features(vit, torch.rand(2, 3, 8, 8)).shape == (2, 8)

    def test_turns_are_quarters(self, rng):
        images = torch.from_numpy(rng.random((4, 3, 5, 5)))
        turned = turn(images, torch.arange(4))
        for k in range(4):
            assert np.array_equal(turned[k], np.rot90(images[k].numpy(), k, (1, 2)))

    def test_a_view_shows_no_more_than_its_share_of_the_picture(self):
        ramp = torch.linspace(0.3, 0.5, 32).expand(8, 3, 32, 32)  # left to right
        dice = torch.Generator().manual_seed(0)
        seen, _ = view(ramp, 16, (0.05, 0.1), dice)
        spans = (seen.amax((1, 2, 3)) - seen.amin((1, 2, 3))).numpy()
        # The widest crop has sqrt(0.1 x sqrt(4/3)) of the width; contrast and brightness stretch.
        assert seen.shape == (8, 3, 16, 16)
        assert spans.max() < 0.2 * math.sqrt(0.1 * math.sqrt(4 / 3)) * 1.4 * 1.4


class TestResume:
    def test_gives_the_weights_of_an_undisturbed_run_to_the_bit(self, pictures, tmp_path):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        whole.mkdir()
        parts.mkdir()
        learner, story = training.begin(ALL, pictures, TOY, None, "cpu")
        training.train(learner, story, pictures, quiet(whole))
        learner, story = training.begin(ALL, pictures, TOY, None, "cpu")
        assert training.train(learner, story, pictures, quiet(parts, until=3)).step == 3
        for until in (4, 6):
            learner, story = training.resume(parts, pictures, "cpu")
            story = training.train(learner, story, pictures, quiet(parts, until=until))
        assert story.step == 6
        expected, _ = checkpoint.load(whole / CHECKPOINT)
        found, _ = checkpoint.load(parts / CHECKPOINT)
        assert expected.keys() == found.keys()
        assert any(name.startswith("optimiser.") for name in found)
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    def test_checkpoints_are_written_as_often_as_asked(self, pictures, tmp_path, monkeypatch):
        steps = []
        keep = checkpoint.save
        monkeypatch.setattr(checkpoint, "save", lambda *a: (steps.append(a[2].step), keep(*a)))
        learner, story = training.begin(ALL, pictures, TOY, None, "cpu")
        ticks = iter(range(1000))
        training.train(
            learner, story, pictures, quiet(tmp_path, save_s=4, clock=lambda: 2 * next(ticks))
        )
        assert steps[-1] == 6
        assert len(steps) > 2

    def test_other_pictures_than_a_checkpoints_are_refused(self, pictures, tmp_path):
        learner, story = training.begin(ALL, pictures, TOY, None, "cpu")
        training.train(learner, story, pictures, quiet(tmp_path, until=1))
        with pytest.raises(ConfigError, match="begun with other pictures"):
            training.resume(tmp_path, replace(pictures, digest="e" * 64), "cpu")

    def test_a_damaged_checkpoint_is_named_and_left_alone(self, pictures, tmp_path):
        learner, story = training.begin(ALL, pictures, TOY, None, "cpu")
        training.train(learner, story, pictures, quiet(tmp_path, until=1))
        path = tmp_path / CHECKPOINT
        damaged = path.read_bytes()[:-10]
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=CHECKPOINT):
            training.resume(tmp_path, pictures, "cpu")
        assert path.read_bytes() == damaged

    def test_a_file_of_weights_is_no_checkpoint(self, tmp_path):
        (tmp_path / CHECKPOINT).write_bytes(embedded_file(".safetensors").read_bytes())
        with pytest.raises(CorruptFile, match="its format is None"):
            checkpoint.load(tmp_path / CHECKPOINT)


def png(colour, side=32):
    out = BytesIO()
    Image.new("RGB", (side, side), colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def archive(tmp_path):
    """A zip with two classes that differ in brightness: six train and two test images each."""
    path = tmp_path / "pictures.zip"
    with zipfile.ZipFile(path, "w") as file:
        for part, count in (("train", 6), ("test", 2)):
            for c, base in (("dark", 20), ("light", 180)):
                for i in range(count):
                    file.writestr(f"{part}/{c}/{i}.png", png((base + i, base, base + 5 * i)))
    return path


def pretrain(capsys, *arguments):
    code = command.main([str(a) for a in arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


class TestCommand:
    @pytest.mark.full
    def test_trains_goes_on_and_measures(self, archive, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(card, "write_graph", lambda *_: None)  # slow; see the full test
        two = tuple(read_pictures(archive, 32, part) for part in ("train", "test"))
        monkeypatch.setattr(card, "digits", lambda: two)
        out = tmp_path / "out"
        always = ("train", "--data", archive, "--out", out)
        new = ("--recipe", "supervised", "--steps", 1, "--batch", 4)
        code, said, _ = pretrain(capsys, *always, *new)
        assert (code, said.count("step 1 of 1")) == (0, 1)
        code, said, _ = pretrain(capsys, *always)
        assert (code, "resumes at step 1 of 1" in said) == (0, True)
        code, said, _ = pretrain(
            capsys, "card", "--out", out, "--cifar100", archive, "--data", archive, "--per-class", 3
        )
        assert code == 0
        page = (out / "vit_nano_patch4_32.md").read_text()
        assert page.strip() in said
        assert "1 steps (0.33 passes)" in page
        weights = load_backbone("embedded", out / "vit_nano_patch4_32.safetensors")
        assert f"`{weights.info.digest}`" in page
        assert (out / "vit_nano_patch4_32.digest").read_text() == f"{weights.info.digest}\n"
        probe = np.load(out / "vit_nano_patch4_32.probe.npy")
        assert (probe.shape, probe.dtype) == ((4, 128), np.float32)

    @pytest.mark.full
    def test_distils_a_transformer_of_other_sizes(self, archive, tmp_path, capsys, monkeypatch):
        two = tuple(read_pictures(archive, 32, part) for part in ("train", "test"))
        monkeypatch.setattr(card, "digits", lambda: two)
        monkeypatch.setattr(card, "write_graph", lambda *_: None)
        folder, out = tmp_path / "targets", tmp_path / "out"
        ask = ("targets", "--data", archive, "--data", archive, "--out", folder, "--mirror")
        code, said, error = pretrain(capsys, *ask, "--teacher-name", "embedded", "--size", 36)
        assert (code, error) == (0, "")
        assert "24 pictures, targets (24, 2, 128) of vit_nano_patch4_32 at 32 px" in said
        line = ("train", "--targets", folder, "--out", out)
        sizes = ("--width", 12, "--depth", 2, "--heads", 3)
        code, said, _ = pretrain(capsys, *line, *sizes, "--steps", 2, "--batch", 8)
        assert (code, "step 2 of 2" in said) == (0, True)
        code, _, error = pretrain(capsys, *line, "--recipe", "distil", "--depth", 3)
        assert (code, "depth 2 (asked for: 3)" in error) == (4, True)
        code, said, error = pretrain(
            capsys, "card", "--out", out, "--cifar100", archive, "--per-class", 3
        )
        assert (code, error) == (0, "")
        assert "width 12, 2 blocks, 3 heads, MLP 48, no head; 5," in said
        assert "| teacher | vit_nano_patch4_32 at 32 px, digest a92a" in said
        assert np.load(out / "vit_nano_patch4_32.probe.npy").shape == (4, 12)

    @pytest.mark.full
    def test_mixes_the_result_with_the_weights_that_it_began_from(
        self, archive, tmp_path, capsys, monkeypatch
    ):
        two = tuple(read_pictures(archive, 32, part) for part in ("train", "test"))
        monkeypatch.setattr(card, "digits", lambda: two)
        monkeypatch.setattr(card, "write_graph", lambda *_: None)
        out, begun = tmp_path / "out", embedded_file(".safetensors")
        new = ("--recipe", "supervised", "--start", begun, "--steps", 1, "--batch", 4)
        assert pretrain(capsys, "train", "--data", archive, "--out", out, *new)[0] == 0
        ask = ("card", "--out", out, "--cifar100", archive, "--per-class", 3)
        other = tmp_path / "other.safetensors"
        start, _ = card.backbone_of(out)
        save_file(start.module.state_dict(), other)
        for wrong, words in (
            (("--blend", "0.5"), "--blend is a share"),
            (("--blend", "1.5", "--start", begun), "--blend is a share"),
            (("--blend", "nan", "--start", begun), "--blend is a share"),
            (("--blend", "0.5", "--start", other), "began from the weights"),
        ):
            code, _, error = pretrain(capsys, *ask, *wrong)
            assert (code, words in error) == (4, True), wrong
        assert not (out / "vit_nano_patch4_32.safetensors").exists()
        code, said, error = pretrain(capsys, *ask, "--blend", "0.25", "--start", begun)
        assert (code, error) == (0, "")
        assert "| blend | 0.25 of the result and 0.75 of the weights" in said
        first, last = load_file(begun), load_file(other)
        found = load_file(out / "vit_nano_patch4_32.safetensors")
        assert found.keys() == first.keys()
        for name, tensor in found.items():
            expected = 0.25 * last[name].double() + 0.75 * first[name].double()
            assert torch.allclose(tensor.double(), expected, atol=1e-7), name

    @pytest.mark.full
    def test_graph_of_the_card_is_that_of_its_weights(self, tmp_path):
        card.embed(card.shipped(), tmp_path)
        name = "vit_nano_patch4_32"
        found = load_onnx_backbone(name, tmp_path / f"{name}.onnx", "cpu")
        assert found.info.digest == load_backbone().info.digest
        probe = np.load(tmp_path / f"{name}.probe.npy")
        np.testing.assert_allclose(probe_features(found), probe, atol=1e-4)

    def test_another_recipe_than_the_checkpoints_is_refused(self, archive, tmp_path, capsys):
        always = ("train", "--data", archive, "--out", tmp_path / "out", "--batch", 4)
        assert pretrain(capsys, *always, "--recipe", "supervised", "--steps", 1)[0] == 0
        code, _, error = pretrain(capsys, *always, "--steps", 9, "--lr", 0.5)
        assert code == 4
        assert "steps 1 (asked for: 9)" in error
        assert "lr 0.001 (asked for: 0.5)" in error

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("--data", "missing.zip", "--steps", 1), "there is no folder or file missing.zip"),
            ((), "a new pre-training needs its length"),
            (("--steps", 1, "--recipe", "layers"), "there are none. Say which: --start"),
            (("--steps", 1, "--start", "nowhere.safetensors"), "nowhere.safetensors cannot be read"),
            (("--steps", 1, "--device", "abacus"), "there is no device 'abacus' here"),
            (("--steps", 1, "--batch", 13), "a step takes 13 pictures, there are 12"),
            (("--steps", 0), "at least 1 step"),
            (("--steps", 1, "--recipe", "distil"), "learns from the features of a teacher"),
            (("--steps", 1, "--hold", "held.zip"), "there is no folder or file held.zip"),
            (("--steps", 1, "--width", 130, "--heads", 4), "got 130, 6 and 4"),
            (("--steps", 1, "--average", 1), "average is at least 0"),
            (("--steps", 1, "--colours", 2), "colours and whiten are 0 to 1"),
            (("--steps", 1, "--keep", 0), "keep and area are shares"),
            (("--epochs", "nan"), "expected a number above 0"),
            (("--epochs", "inf"), "expected a number above 0"),
            (("--minutes", -1), "expected a number above 0"),
            (("--steps", 1, "--lr", "nan"), "expected a number above 0"),
            (("--steps", 1, "--threads", 0), "expected a number above 0"),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_sentence(self, given, words, archive, tmp_path, capsys):
        code, _, error = pretrain(
            capsys, "train", "--out", tmp_path / "out", "--data", archive, "--batch", 4, *given
        )
        assert code == 4
        assert words in error
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("--size", 31), "have 32 to 4096 pixels a side, got --size 31"),
            (("--teacher-size", 33), "cannot have images of 33 pixels"),
            (("--data", "missing.zip"), "there is no folder or file missing.zip"),
            (("--teacher", "missing.safetensors"), "missing.safetensors cannot be read"),
            (("--teacher-name", "vit_nowhere"), "timm has no model 'vit_nowhere'"),
        ],
    )
    def test_bad_input_of_targets_is_one_sentence(self, given, words, archive, tmp_path, capsys):
        line = ("targets", "--out", tmp_path / "out", "--data", archive)
        code, _, error = pretrain(capsys, *line, "--teacher-name", "embedded", *given)
        assert code == 4
        assert words in error
        assert error.count("\n") == 1

    def test_a_checkpoint_refuses_another_start_or_recipe(self, archive, tmp_path, capsys):
        line = ("train", "--out", tmp_path / "out", "--data", archive)
        code, _, _ = pretrain(capsys, *line, "--batch", 4, "--steps", 1, "--recipe", "joint")
        assert code == 0
        code, _, error = pretrain(capsys, *line, "--start", "embedded")
        assert code == 4
        assert "began from random weights, not from embedded" in error
        code, _, error = pretrain(capsys, *line, "--recipe", "supervised")
        assert code == 4
        assert "dino 0.5 (asked for: 0.0)" in error

    def test_weights_that_diverge_are_one_sentence_and_no_place_for_a_file_is_another(
        self, archive, tmp_path, capsys
    ):
        line = ("train", "--data", archive, "--batch", 4, "--recipe", "supervised")
        far = ("--steps", 9, "--lr", 1e9, "--out", tmp_path / "out")
        code, _, error = pretrain(capsys, *line, *far)
        assert code == 1
        assert "the loss is not finite at step" in error
        code, _, error = pretrain(capsys, *line, "--steps", 1, "--out", archive)
        assert code == 1
        assert "cannot create" in error

    def test_minutes_become_a_number_of_steps(self, archive, tmp_path, capsys):
        code, said, _ = pretrain(
            capsys, "train", "--out", tmp_path / "out", "--data", archive, "--batch", 4,
            "--minutes", 1e-6, "--recipe", "supervised",
        )  # fmt: skip
        assert code == 0
        assert "1 steps fit 1e-06 minutes; --steps 1 repeats this" in said

    @pytest.mark.full
    def test_kill_9_at_any_step_changes_no_weight(self, archive, tmp_path):
        def start(out, *more):
            line = [sys.executable, SCRIPT, "train", "--data", archive, "--out", tmp_path / out]
            line += ["--batch", 4, "--threads", 1, "--save-every", 0, "--recipe", "dino", *more]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen([str(part) for part in line], env=environment)

        assert start("whole", "--steps", 12).wait() == 0
        checkpoint_path = tmp_path / "killed" / CHECKPOINT
        for _ in range(2):
            before = checkpoint_path.stat().st_mtime_ns if checkpoint_path.exists() else 0
            process = start("killed", "--steps", 12)
            while process.poll() is None:
                if checkpoint_path.exists() and checkpoint_path.stat().st_mtime_ns > before:
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait()
        assert start("killed").wait() == 0
        expected, _ = checkpoint.load(tmp_path / "whole" / CHECKPOINT)
        found, _ = checkpoint.load(checkpoint_path)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


class Killed(BaseException):
    """Ends a call at this point; files keep the bytes that were written."""


def toy_teacher(seed):
    """Return a backbone whose preprocessing cuts the centre out."""
    prepared = replace(plain(16), crop_pct=0.8)
    return wrap_backbone(training.new_model(TOY, seed), "toy", prepared)


class TestTargets:
    """Two sources: a zip with parts and one without."""

    @pytest.fixture
    def sources(self, archive, tmp_path, rng):
        other = tmp_path / "other.zip"
        with zipfile.ZipFile(other, "w") as file:
            for i in range(70):
                out = BytesIO()
                Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(out, "PNG")
                file.writestr(f"n{i % 2}/{i:02}.png", out.getvalue())
        return [archive, other]

    @pytest.fixture
    def teacher(self):
        return toy_teacher(0)

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(targets, "CHUNK", 8)
        (tmp_path / "targets").mkdir()
        return tmp_path / "targets"

    def compute(self, sources, teacher, folder, mirror=True, size=16, **options):
        return targets.compute(
            sources, teacher, size=size, mirror=mirror, how=quiet(folder, **options)
        )

    def test_are_the_teachers_features_of_whole_pictures_in_their_order(
        self, sources, teacher, folder
    ):
        self.compute(sources, teacher, folder, size=20)
        found = targets.read_targets(folder)
        assert found.images.shape == (82, 20, 20, 3)
        assert found.targets.shape == (82, 2, 8)
        assert found.classes == ("dark", "light", "n0", "n1")
        assert found.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 35 + [3] * 35
        assert "toy at 16 px, digest " in found.teacher
        own = np.concatenate([read_pictures(s, 20, "train").images for s in sources])
        assert np.array_equal(found.images, own)
        seen = np.concatenate([read_pictures(s, 16, "train").images for s in sources])
        for side, pictures in enumerate((seen, np.ascontiguousarray(seen[:, :, ::-1]))):
            np.testing.assert_allclose(
                found.targets[:, side], teacher.features(pictures), rtol=2e-3, atol=1e-3
            )

    @pytest.mark.parametrize(
        ("when", "again"), [(1, 164), (81, 164), (82, 164), (83, 82), (90, 82), (99, 74), (164, 10)]
    )
    def test_a_kill_at_any_picture_changes_no_byte(
        self, when, again, sources, teacher, folder, tmp_path, monkeypatch
    ):
        """82 pictures are decoded for the student, then 82 for the teacher, 8 in a chunk."""
        (tmp_path / "whole").mkdir()
        self.compute(sources, teacher, tmp_path / "whole")
        squares, number = targets.square_of, itertools.count(1)

        def killed(*args):
            if next(number) == when:
                raise Killed
            return squares(*args)

        monkeypatch.setattr(targets, "square_of", killed)
        with pytest.raises(Killed):
            self.compute(sources, teacher, folder)
        with pytest.raises(DataError):
            targets.read_targets(folder)
        self.compute(sources, teacher, folder)
        assert next(number) == 1 + when + again
        for name in ("plan.json", "sources.npy", "pictures.npy", "targets.npy", "digest.txt"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    @pytest.mark.parametrize("size", [0, 5, 200, 128 + 80 * 32 + 9, 128 + 82 * 32])
    def test_a_torn_end_of_the_targets_is_computed_again(self, size, sources, teacher, folder):
        """After a power cut a file may be short, or have its length and not its content."""
        self.compute(sources, teacher, folder)
        whole = (folder / "targets.npy").read_bytes()
        (folder / "digest.txt").unlink()
        last = 128 + 80 * 32  # the header, and ten chunks of 2 features of 8 numbers of 2 bytes
        torn = whole[:last] + bytes(len(whole) - last)
        (folder / "targets.npy").write_bytes(torn[:size])
        self.compute(sources, teacher, folder)
        assert (folder / "targets.npy").read_bytes() == whole

    @pytest.mark.full
    def test_kill_9_of_the_command_changes_no_byte(self, tmp_path, rng):
        pictures = tmp_path / "pictures.zip"
        with zipfile.ZipFile(pictures, "w") as file:
            for i in range(400):
                file.writestr(f"one/{i:03}.png", png(tuple(rng.integers(0, 256, 3).tolist())))

        def start(out):
            line = [sys.executable, SCRIPT, "targets", "--data", pictures, "--out", tmp_path / out]
            line += ["--teacher-name", "embedded", "--threads", 1]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen([str(part) for part in line], env=environment)

        assert start("whole").wait() == 0
        path = tmp_path / "killed" / "targets.npy"
        process = start("killed")
        while process.poll() is None:
            if path.exists() and path.stat().st_size > 3 * 64 * 256:
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait() == -signal.SIGKILL
        assert not (path.parent / "digest.txt").exists()
        assert start("killed").wait() == 0
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()

    def test_a_second_call_computes_nothing(self, sources, teacher, folder, monkeypatch):
        self.compute(sources, teacher, folder)
        monkeypatch.setattr(targets, "square_of", lambda *_: pytest.fail("decoded again"))
        self.compute(sources, teacher, folder)

    def test_another_teacher_size_or_side_is_refused(self, sources, teacher, folder):
        self.compute(sources, teacher, folder)
        with pytest.raises(ConfigError, match="targets with teacher toy at 16 px, digest"):
            self.compute(sources, toy_teacher(1), folder)
        with pytest.raises(ConfigError, match=r"size 16 \(asked for: 20\), mirror True"):
            self.compute(sources, teacher, folder, size=20, mirror=False)

    def test_other_pictures_are_refused(self, sources, teacher, folder):
        self.compute(sources, teacher, folder)
        with zipfile.ZipFile(sources[0]) as file:
            content = {name: file.read(name) for name in file.namelist()}
        content["train/light/3.png"] = png((1, 2, 3))
        with zipfile.ZipFile(sources[0], "w") as file:
            for name, data in content.items():
                file.writestr(name, data)
        with pytest.raises(DataError, match=r"1 of 82 pictures .* first is 'train/light/3.png'"):
            self.compute(sources, teacher, folder)
        with pytest.raises(DataError, match="begun with 82 pictures, there are 12"):
            self.compute(sources[:1], teacher, folder)

    def test_a_picture_that_changes_meanwhile_is_refused(
        self, tmp_path, teacher, folder, monkeypatch
    ):
        place = tmp_path / "train" / "one"
        place.mkdir(parents=True)
        for i in range(3):
            (place / f"{i}.png").write_bytes(png((i, 0, 0)))
        write = targets._write_targets

        def later(*args):
            (place / "2.png").write_bytes(png((9, 9, 9)))
            write(*args)

        monkeypatch.setattr(targets, "_write_targets", later)
        with pytest.raises(DataError, match=r"'train/one/2.png': it has changed"):
            self.compute([tmp_path], teacher, folder)

    def test_a_damaged_picture_is_named_before_the_teacher_begins(
        self, tmp_path, teacher, folder, monkeypatch
    ):
        place = tmp_path / "train" / "one"
        place.mkdir(parents=True)
        (place / "a.png").write_bytes(png(9)[:50])
        monkeypatch.setattr(teacher, "features", lambda _: pytest.fail("not reached"))
        with pytest.raises(DataError, match=r"picture 'train/one/a.png': the image cannot be"):
            self.compute([tmp_path], teacher, folder)

    def test_damaged_or_missing_targets_are_one_sentence(self, sources, teacher, folder):
        with pytest.raises(DataError, match="there are no targets"):
            targets.read_targets(folder)
        self.compute(sources, teacher, folder)
        data = bytearray((folder / "targets.npy").read_bytes())
        data[-1] ^= 1
        (folder / "targets.npy").write_bytes(data)
        with pytest.raises(CorruptFile, match="its digest is another one"):
            targets.read_targets(folder)
        (folder / "plan.json").write_bytes(b"{}")
        with pytest.raises(CorruptFile, match="its format is not"):
            targets.read_targets(folder)

    def test_progress_is_told(self, sources, teacher, folder):
        lines = []
        ticks = iter(range(10_000))
        how = Sitting(folder, tell=lines.append, clock=lambda: 5.0 * next(ticks))
        targets.compute(sources, teacher, size=16, mirror=False, how=how)
        assert lines[0] == "files read: 1 of 82, 0.1/s, 14 minutes left"
        assert any(line.startswith("pictures decoded: ") for line in lines)


class TestDistil:
    """Pictures of any colour with one brighter quarter, and a teacher that sees which it is."""

    RECIPE = Recipe.of("distil", 100, batch=16, lr=3e-3, area=0.8)

    def taught(self, rng, count=64):
        """Return pictures of four kinds; the mirrored ones are of another kind."""
        kinds = np.arange(count) % 4
        images = np.empty((count, 20, 20, 3), np.uint8)
        images[:] = rng.integers(0, 60, (count, 1, 1, 3))
        images += rng.integers(0, 20, images.shape, dtype=np.uint8)
        for image, kind in zip(images, kinds, strict=True):
            row, column = 10 * (kind // 2), 10 * (kind % 2)
            image[row : row + 10, column : column + 10] += 120
        centres = rng.standard_normal((4, 12))
        both = np.stack([kinds, kinds ^ 1], 1)
        seen = centres[both] + 0.1 * rng.standard_normal((count, 2, 12)) + 3
        return Pictures(images, kinds, tuple("abcd"), "d" * 64, seen.astype(np.float16), "toy")

    @pytest.mark.full
    def test_lowers_its_loss_and_brings_the_kinds_apart(self, rng, tmp_path):
        pictures = self.taught(rng)
        fresh = replace(pictures, images=self.taught(np.random.default_rng(1)).images)
        model = {**TOY, "embed_dim": 24, "depth": 2}
        learner, story = training.begin(self.RECIPE, pictures, model, None, "cpu")

        def right():
            def extract(images):
                x = torch.from_numpy(images[:, 2:18, 2:18]).permute(0, 3, 1, 2) / 255
                with torch.no_grad():
                    return features(learner.student["vit"], normalised(x)).numpy()

            return transfer.nearest_mean(transfer.Features.of(extract, pictures, fresh))

        losses = []
        learn = learner.learn
        learner.learn = lambda *a: losses.append(learn(*a)["distil"]) or {}
        before = right()
        training.train(learner, story, pictures, quiet(tmp_path))
        assert np.mean(losses[:4]) > 0.8
        assert np.mean(losses[-4:]) < 0.4
        assert before < 60 < 90 < right()

    def test_mirrored_views_have_the_mirrored_answers(self, rng, monkeypatch):
        pictures = self.taught(rng, 16)
        learner, _ = training.begin(self.RECIPE, pictures, TOY, None, "cpu")
        asked = []
        monkeypatch.setattr(
            learner_module, "answers_loss", lambda s, a: asked.append(a) or s.sum() * 0
        )
        every = torch.arange(16)
        images, labels, both = training._batch(pictures, every)
        learner.learn(images, labels, both)
        _, mirrored = view(
            torch.zeros(16, 3, 20, 20), 16, (0.8, 1.0), learner_module.generator(0, 0), 0.5
        )
        assert 0 < mirrored.sum() < 16
        numbers = both.float()[every, mirrored.long()]
        torch.testing.assert_close(asked[0], learner.guide["answers"]([numbers]))
        learner.learn(images, labels, both[:, :1])
        torch.testing.assert_close(asked[1], learner.guide["answers"]([both[:, 0].float()]))

    def test_a_mirrored_view_shows_left_on_the_right(self):
        ramp = torch.linspace(0, 1, 16).expand(32, 3, 16, 16)
        seen, mirrored = view(ramp, 16, (0.9, 1.0), torch.Generator().manual_seed(0), 0.0)
        assert torch.equal(seen[:, 0, 0, 0] > seen[:, 0, 0, -1], mirrored)

    def test_view_without_colours_keeps_them(self):
        grey = torch.full((4, 3, 8, 8), 0.25)
        grey[:, 0] = 0.75
        seen, _ = view(grey, 8, (0.5, 1.0), torch.Generator().manual_seed(0), 0.0)
        torch.testing.assert_close(seen, grey)

    @pytest.mark.full
    def test_resumes_to_the_bit_with_a_mean_of_the_weights(self, rng, tmp_path):
        pictures = self.taught(rng)
        recipe = replace(self.RECIPE, steps=6, average=0.9)
        for folder, stops in (("whole", (None,)), ("parts", (2, 5, None))):
            (tmp_path / folder).mkdir()
            for number, stop in enumerate(stops):
                if number:
                    learner, story = training.resume(tmp_path / folder, pictures, "cpu")
                else:
                    learner, story = training.begin(recipe, pictures, TOY, None, "cpu")
                training.train(learner, story, pictures, quiet(tmp_path / folder, until=stop))
        expected, story = checkpoint.load(tmp_path / "whole" / CHECKPOINT)
        found, _ = checkpoint.load(tmp_path / "parts" / CHECKPOINT)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert (story.teacher, story.model) == ("toy", TOY)
        backbone, _ = card.backbone_of(tmp_path / "whole")
        state = backbone.module.state_dict()
        assert all(torch.equal(v, expected[f"teacher.vit.{k}"]) for k, v in state.items())
        assert not torch.equal(state["cls_token"], expected["student.vit.cls_token"])

    def test_a_mean_of_the_weights_forgets_the_first_ones(self):
        recipe = replace(self.RECIPE, average=0.9)
        momenta = [recipe.teacher_momentum(s) for s in (0, 10, 80, 1000)]
        assert momenta == pytest.approx([0.1, 0.55, 0.9, 0.9])

    def test_needs_targets_and_no_other_recipe_takes_them(self, rng, pictures):
        with pytest.raises(ConfigError, match="learns from the features of a teacher"):
            training.begin(replace(self.RECIPE, batch=4), pictures, TOY, None, "cpu")
        with pytest.raises(ConfigError, match="and no other"):
            training.begin(ALL, self.taught(rng), TOY, None, "cpu")

    def test_answers_fit_the_directions_that_the_final_norm_leaves(self, rng):
        learner, _ = training.begin(self.RECIPE, self.taught(rng), TOY, None, "cpu")
        answers = learner.guide["answers"].map
        assert int(torch.linalg.matrix_rank(answers, rtol=1e-4)) == 7  # of 8
        assert float(answers.sum(1).norm() / answers.norm()) < 1e-4


class TestHold:
    """Held pictures: the student's features of them stay what the starting weights say."""

    RECIPE = Recipe(
        steps=40, batch=8, lr=3e-3, classes=1.0, rotations=False, smoothing=0.0, area=0.8,
        colours=0.5, hold=1.0,
    )  # fmt: skip

    def both(self, pictures, rng):
        held = np.empty((10, 16, 16, 3), np.uint8)
        held[:] = rng.integers(0, 256, (10, 1, 1, 3))  # of one colour each, the others are noise
        return pictures.holding(Pictures(held, np.zeros(10, np.int64), ("x",), "e" * 64))

    def start(self):
        torch.manual_seed(3)
        return training.new_model(TOY, 3).state_dict()

    def learned(self, pictures, recipe, folder):
        folder.mkdir()
        learner, story = training.begin(recipe, pictures, TOY, self.start(), "cpu")
        training.train(learner, story, pictures, quiet(folder))
        return learner

    @pytest.mark.full
    def test_features_of_held_pictures_stay_and_those_of_others_move(self, pictures, rng, tmp_path):
        both = self.both(pictures, rng)
        free = self.learned(pictures, replace(self.RECIPE, hold=0.0), tmp_path / "free")
        holds = self.learned(both, self.RECIPE, tmp_path / "holds")

        def moved(learner, images):
            x = normalised(torch.from_numpy(images).permute(0, 3, 1, 2) / 255)
            with torch.no_grad():
                first = features(holds.guide["start"], x).double()
                last = features(learner.student["vit"], x).double()
            cosine = (first * last).sum(1) / (first.norm(dim=1) * last.norm(dim=1))
            return float(1 - cosine.mean())

        assert moved(holds, both.held) < 0.25 * moved(free, both.held)
        assert moved(free, both.held) > 0.05
        assert moved(holds, pictures.images) > 1e-3  # the others are free to move

    def test_loss_is_one_minus_the_cosine_to_the_starting_weights_on_the_same_views(
        self, pictures, rng
    ):
        both = self.both(pictures, rng)
        learner, _ = training.begin(self.RECIPE, both, TOY, self.start(), "cpu")
        batch = training._batch(both, torch.arange(8))
        held = training._held(both, learner)
        assert held.shape == (2, 16, 16, 3)  # a quarter of the batch
        assert learner.learn(*batch, held)["hold"] == pytest.approx(0, abs=1e-6)  # nothing moved
        with torch.no_grad():
            for p in learner.student["vit"].parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        dice = learner_module.generator(0, 1)
        state = dice.get_state()
        found = float(learner._hold(held, dice).detach())
        dice.set_state(state)
        seen, _ = view(held.permute(0, 3, 1, 2) / 255, 16, (0.8, 1.0), dice, 0.5)
        start = training.new_model(TOY, 0)
        start.load_state_dict(self.start())
        a, b = (
            features(m, normalised(seen)).detach().numpy().astype(np.float64)
            for m in (start, learner.student["vit"])
        )
        cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert found == pytest.approx(1 - cosines.mean(), rel=1e-4)
        assert found > 1e-3

    def test_rows_depend_on_the_seed_and_the_step_alone(self):
        recipe = replace(self.RECIPE, batch=40)
        first, again, other = (learner_module.held_rows(10, recipe, s) for s in (3, 3, 4))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first, learner_module.held_rows(10, replace(recipe, seed=1), 3))
        assert len(first) == 10
        assert int(first.max()) < 10

    @pytest.mark.full
    def test_resumes_to_the_bit(self, pictures, rng, tmp_path):
        both, recipe = self.both(pictures, rng), replace(self.RECIPE, steps=6)
        for folder, stops in (("whole", (None,)), ("parts", (2, None))):
            (tmp_path / folder).mkdir()
            for number, stop in enumerate(stops):
                if number:
                    learner, story = training.resume(tmp_path / folder, both, "cpu")
                else:
                    learner, story = training.begin(recipe, both, TOY, self.start(), "cpu")
                training.train(learner, story, both, quiet(tmp_path / folder, until=stop))
        expected, story = checkpoint.load(tmp_path / "whole" / CHECKPOINT)
        found, _ = checkpoint.load(tmp_path / "parts" / CHECKPOINT)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert story.held == 10
        with pytest.raises(ConfigError, match="other pictures or targets"):
            training.resume(tmp_path / "whole", pictures, "cpu")

    def test_needs_weights_to_start_from(self, pictures, rng, archive, tmp_path, capsys):
        both = self.both(pictures, rng)
        for images, weights in ((both, None), (pictures, self.start())):
            with pytest.raises(ConfigError, match="Give --hold together with --start"):
                training.begin(self.RECIPE, images, TOY, weights, "cpu")
        line = ("train", "--out", tmp_path / "out", "--data", archive, "--hold", archive)
        code, _, error = pretrain(capsys, *line, "--recipe", "supervised", "--steps", 1)
        assert code == 4
        assert "held pictures need weights that know them" in error
        with (
            zipfile.ZipFile(tmp_path / "overlap.zip", "w") as made,
            zipfile.ZipFile(archive) as seen,
        ):
            [first, *_] = [name for name in seen.namelist() if name.startswith("train/")]
            for place in ("train/camel/1.png", "train/x/1.png"):
                made.writestr(place, seen.read(first))
        code, _, error = pretrain(capsys, *line[:-1], tmp_path / "overlap.zip", "--steps", 1)
        assert code == 4
        assert "are also classes of CIFAR-100, such as camel" in error

    @pytest.mark.full
    def test_the_command_holds_resumes_and_says_so_on_the_card(self, archive, tmp_path, capsys):
        held, out = tmp_path / "held.zip", tmp_path / "out"
        assert pretrain(capsys, "glyphs", "--out", held, "--count", 12)[0] == 0
        line = ("train", "--out", out, "--data", archive, "--recipe", "supervised", "--batch", 4)
        more = ("--hold", held, "--start", "embedded", "--steps", 2)
        code, said, error = pretrain(capsys, *line, *more)
        assert (code, error) == (0, "")
        assert "step 2 of 2" in said
        code, said, _ = pretrain(capsys, *line, *more)
        assert (code, "resumes at step 2 of 2" in said) == (0, True)
        code, _, error = pretrain(capsys, *line)
        assert code == 4
        assert "Give the same --data or --targets, and --hold" in error
        story = checkpoint.load(out / CHECKPOINT)[1]
        rows = card._origin(story)
        assert rows["held"].startswith("features of 12 other pictures stay")
        assert rows["pre-training data"].endswith("with the held ones")

    def test_glyphs_are_letters_in_the_digits_shades(self, tmp_path, capsys):
        code, _, error = pretrain(capsys, "glyphs", "--out", tmp_path / "a.zip", "--seed", -1)
        assert (code, "a seed is at least 0, got -1" in error) == (4, True)
        first, again = tmp_path / "new" / "a.zip", tmp_path / "b.zip"
        for path in (first, again):
            code, out, _ = pretrain(capsys, "glyphs", "--out", path, "--count", 60)
            assert code == 0
            assert "60 pictures in" in out
        assert first.read_bytes() == again.read_bytes()
        code, _, _ = pretrain(capsys, "glyphs", "--out", again, "--count", 60, "--seed", 1)
        assert (code, first.read_bytes() == again.read_bytes()) == (0, False)
        with zipfile.ZipFile(first) as found:
            names = found.namelist()
            squares = [np.asarray(Image.open(BytesIO(found.read(n)))) for n in names]
        codes = {int(name.split("/")[1].removeprefix("U+"), 16) for name in names}
        assert all(chr(code).isalpha() for code in codes)
        assert len(codes) > 20
        shades = {n * 255 // 16 for n in range(17)}
        for square in squares:
            assert square.shape == (8, 8)
            assert set(np.unique(square).tolist()) <= shades
            assert square.max() > 0
        assert read_pictures(first, 32, "train").images.shape == (60, 32, 32, 3)


class TestPictures:
    def test_are_the_train_part_in_the_order_of_their_names(self, archive):
        found = read_pictures(archive, 8, "train")
        assert found.images.shape == (12, 8, 8, 3)
        assert found.classes == ("dark", "light")
        assert found.images[:, 0, 0, 0].tolist() == [*range(20, 26), *range(180, 186)]
        some = read_pictures(archive, 8, "train", 2)
        assert some.labels.tolist() == [0, 0, 1, 1]
        assert some.digest != found.digest

    def test_classes_of_cifar100_are_refused_unless_told(self):
        assert len(CIFAR100) == 100
        with pytest.raises(DataError, match="1 of the 2 classes .* such as Aquarium_Fish"):
            check_disjoint(("Aquarium_Fish", "car"), allowed=False)
        check_disjoint(("Aquarium_Fish", "car"), allowed=True)
        check_disjoint(("airplane", "automobile", "truck"), allowed=False)

    def test_one_class_is_too_few(self, tmp_path):
        (tmp_path / "train" / "one").mkdir(parents=True)
        (tmp_path / "train" / "one" / "a.png").write_bytes(png(9))
        with pytest.raises(DataError, match="at least two classes"):
            read_pictures(tmp_path, 8, "train")


class TestTransfer:
    """Features whose answers can be worked out by hand."""

    def test_nearest_mean_goes_by_angle(self):
        # Means (9.5, 0) and (0, 1): (3, 2) is nearer to the second point and the first angle.
        train = np.array([[9.0, 0.0], [10.0, 0.0], [0.0, 1.0]])
        test = np.array([[3.0, 2.0], [0.1, 0.2], [1.0, 3.0], [5.0, 1.0]])
        found = transfer.Features(train, np.array([0, 0, 1]), test, np.array([0, 1, 1, 1]))
        assert transfer.nearest_mean(found) == 75.0

    def test_neighbours_vote_by_how_near_they_are(self):
        at = np.radians([0.0, 40.0, 42.0, 90.0])
        train = np.stack([np.cos(at), np.sin(at)], 1)
        labels = np.array([0, 1, 1, 0])
        test = np.stack([np.cos(np.radians([2.0, 30.0])), np.sin(np.radians([2.0, 30.0]))], 1)
        # At 2 degrees exp((1 - 0.0006) / 0.07) outweighs both of 38 and 40 degrees away.
        found = transfer.Features(train, labels, test, np.array([0, 1]))
        assert transfer.neighbours(found, 3) == 100.0
        assert transfer.neighbours(replace(found, answers=np.array([1, 1])), 3) == 50.0

    def test_linear_ridge_is_the_solution_of_its_normal_equations(self, rng):
        train, test = rng.standard_normal((30, 3)), rng.standard_normal((50, 3))
        labels = (train[:, 0] > 0.3).astype(int)
        x, targets = np.c_[train, np.ones(30)], np.eye(2)[labels]
        # Ridge as least squares with sqrt(lambda) rows added, lambda = 1.
        w = np.linalg.lstsq(np.r_[x, np.eye(4)], np.r_[targets, np.zeros((4, 2))], rcond=None)[0]
        answers = (np.c_[test, np.ones(50)] @ w).argmax(1)
        answers[:5] = 1 - answers[:5]
        found = transfer.Features(train, labels, test, answers)
        assert transfer.linear(found) == 90.0

    def test_relu_ridge_tells_what_no_line_does(self, rng):
        corner = rng.standard_normal((400, 2))
        labels = (corner.prod(1) > 0).astype(int)  # XOR
        found = transfer.Features(corner[:300], labels[:300], corner[300:], labels[300:])
        assert transfer.linear(found) < 70 < 90 < transfer.relu_ridge(found, width=500)
