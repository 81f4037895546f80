"""PLoRA's client half against the float64 definition, and what must hold on any client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import DIM, Federation, make_tasks, toy_backbone, toy_images
from adapters.plora_reference import RANK, features_and_tap, hand_made, objective
from fcil_adapters.contract import Context, State
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.plora import METHOD
from fcil_adapters.methods.plora.learner import Learner
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
IMAGES = toy_images({5: 7, 9: 4}, seed=1)
FAST = {
    "rank": RANK, "blocks": [0], "epochs": 2, "batch_size": 4, "lr_prototype": 1e-2,
    "lr_lora": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def context(backbone, kind="train", task=TASKS[2], **kw) -> Context:
    extra = {
        k: kw.pop(k) for k in ("micro_batch", "seed", "progress", "round", "rounds") if k in kw
    }
    h = make_hparams(METHOD, {**FAST, **kw})
    start = {"round": 0, "rounds": 3, "seed": (1, 2), **extra}
    return Context(kind, task, hparams=h, backbone_info=backbone.info, backbone=backbone, **start)


def learn(ctx, parts=None, images=IMAGES) -> Payload:
    parts = hand_made(TASKS, unseen=(2,)) if parts is None else parts
    return Learner().run(ctx, State(), parts, images)[1]


def first_loss(backbone, parts, images=IMAGES, **kw) -> float:
    """The loss that the learner reports for its first step, before anything has moved."""
    seen = []
    learn(
        context(backbone, progress=seen.append, augment="none", batch_size=64, **kw), parts, images
    )
    return seen[0].loss


class TestObjective:
    @pytest.mark.parametrize("dce", ["rms", "sq", "sq_over_d"])
    def test_equals_the_definition(self, backbone, dce):
        parts = hand_made(TASKS, unseen=(2,))
        got = first_loss(backbone, parts, dce=dce, delta=0.7, lambda_pl=0.3, gamma_kd=2.0)
        expected = objective(backbone, parts, IMAGES, dce=dce, delta=0.7, lambda_pl=0.3, gamma=2.0)
        assert got == pytest.approx(expected, rel=1e-4)

    def test_the_teacher_is_compared_after_the_last_adapted_block(self, backbone):
        parts = hand_made(TASKS, blocks=(0, 1))
        got = first_loss(backbone, parts, blocks=[0, 1], scale=0.5)
        expected = objective(backbone, parts, IMAGES, blocks=(0, 1), scale=0.5)
        assert got == pytest.approx(expected, rel=1e-4)

    def test_mean_d_divides_the_distillation_by_the_width(self, backbone):
        parts = hand_made(TASKS)
        got = first_loss(backbone, parts, kd_reduction="mean_d")
        expected = objective(backbone, parts, IMAGES, reduction="mean_d")
        assert got == pytest.approx(expected, rel=1e-4)
        assert first_loss(backbone, parts, gamma_kd=5.0 * DIM, kd_reduction="mean_d") == (
            pytest.approx(first_loss(backbone, parts), rel=1e-4)
        )

    def test_without_distillation_no_teacher_is_needed(self, backbone):
        parts = hand_made(TASKS)
        del parts["lora/1"]
        got = first_loss(backbone, parts, gamma_kd=0.0)
        assert got == pytest.approx(objective(backbone, parts, IMAGES), rel=1e-4)

    def test_the_first_task_has_no_teacher(self, backbone):
        images, parts = toy_images({3: 4, 4: 3}), hand_made(TASKS[:1])
        got = first_loss(backbone, parts, images, task=TASKS[0])
        assert got == pytest.approx(objective(backbone, parts, images), rel=1e-4)

    def test_a_client_with_one_class_still_has_all_columns(self, backbone):
        parts, images = hand_made(TASKS), IMAGES.of([9])
        got = first_loss(backbone, parts, images)
        assert got == pytest.approx(objective(backbone, parts, images), rel=1e-4)


class TestTraining:
    def test_distillation_keeps_what_the_teacher_produced(self, backbone):
        """The class token drifts less from the teacher's with a teacher than without."""
        parts = hand_made(TASKS)
        parts["lora/2"] = parts["lora/1"]

        def drift(gamma):
            sent = learn(context(backbone, gamma_kd=gamma, epochs=6, lr_prototype=0.1), parts)
            _, moved = features_and_tap(backbone, sent.tensors, IMAGES)
            _, kept = features_and_tap(backbone, parts["lora/1"].tensors, IMAGES)
            return np.linalg.norm(moved - kept)

        assert drift(5.0) < 0.7 * drift(0.0)

    def test_the_same_context_gives_the_same_bytes(self, backbone):
        torch.manual_seed(1)
        one = pack(learn(context(backbone)))
        torch.manual_seed(2)
        assert pack(learn(context(backbone))) == one

    @pytest.mark.parametrize("other", [{"seed": (1, 3)}, {"round": 1}])
    def test_another_client_or_round_draws_other_batches(self, backbone, other):
        flat = {"schedule": "constant"}
        one, two = learn(context(backbone, **flat)), learn(context(backbone, **flat, **other))
        assert not np.array_equal(one.tensors["proto"], two.tensors["proto"])

    @pytest.mark.parametrize("micro", [1, 3, 100])
    def test_micro_batches_give_the_same_effective_batch(self, backbone, micro):
        whole, split = learn(context(backbone)), learn(context(backbone, micro_batch=micro))
        for name in ("proto", "mean", "lora.0.q.A", "lora.0.v.B"):
            np.testing.assert_allclose(split.tensors[name], whole.tensors[name], atol=5e-4)

    def test_the_schedule_scales_the_first_adam_step(self, backbone):
        parts = hand_made(TASKS)
        one_step = {"epochs": 1, "batch_size": 64, "lr_prototype": 1e-3}
        for schedule, factor in (("cosine", 0.25), ("constant", 1.0)):
            sent = learn(context(backbone, round=2, schedule=schedule, **one_step), parts)
            moved = np.abs(sent.tensors["proto"] - parts["task/2"].tensors["proto"])
            assert np.median(moved) == pytest.approx(1e-3 * factor, rel=1e-2)

    def test_weight_decay_shrinks_the_lora(self, backbone):
        sizes = [
            np.abs(learn(context(backbone, weight_decay=v, epochs=6)).tensors["lora.0.q.A"]).sum()
            for v in (0.0, 10.0)
        ]
        assert sizes[1] < sizes[0]

    def test_progress_counts_every_step(self, backbone):
        seen = []
        learn(context(backbone, progress=seen.append))
        assert [p.done for p in seen] == list(range(1, 7))  # 11 images in batches of 4, twice


class TestReports:
    def test_means_are_those_of_the_trained_model_on_plain_images(self, backbone):
        sent = learn(context(backbone))
        f, _ = features_and_tap(backbone, sent.tensors, IMAGES)
        for row, c in enumerate((5, 9)):
            np.testing.assert_allclose(
                sent.tensors["mean"][row], f[IMAGES.labels == c].mean(0), atol=1e-3
            )

    def test_means_of_training_are_those_of_all_epochs(self, backbone):
        still = {"lr_lora": 0.0, "augment": "none"}
        one = learn(context(backbone, **still))
        other = learn(context(backbone, mean_from="training", **still))
        np.testing.assert_allclose(other.tensors["mean"], one.tensors["mean"], atol=1e-5)
        moving = learn(context(backbone, mean_from="training"))
        assert (
            np.abs(moving.tensors["mean"] - learn(context(backbone)).tensors["mean"]).max() > 1e-3
        )

    def test_prepare_sends_means_of_the_model_as_the_task_opens_and_nothing_else(self, backbone):
        parts = hand_made(TASKS)
        del parts["lora/1"]  # nobody distils in this exchange
        sent = learn(context(backbone, kind="prepare"), parts)
        assert sorted(sent.tensors) == ["classes", "count", "mean", "n", "owned"]
        f, _ = features_and_tap(backbone, parts["lora/2"].tensors, IMAGES)
        np.testing.assert_allclose(
            sent.tensors["mean"][0], f[IMAGES.labels == 5].mean(0), atol=1e-4
        )

    def test_stay_at_home_below_the_minimum_count(self, backbone):
        sent = learn(context(backbone, min_count_upload=5))
        assert sent.tensors["owned"].tolist() == [5]
        assert sent.tensors["count"].tolist() == [7, 4]


class TestEdges:
    def test_no_images(self, backbone):
        parts = hand_made(TASKS)
        for kind in ("prepare", "train"):
            sent = learn(context(backbone, kind=kind), parts, IMAGES.of([]))
            assert sent.tensors["n"].tolist() == [0]
        np.testing.assert_array_equal(sent.tensors["proto"], parts["task/2"].tensors["proto"])

    def test_batches_of_one_image(self, backbone):
        sent = learn(
            context(backbone, batch_size=1, mean_from="training"), images=toy_images({9: 2})
        )
        assert all(np.isfinite(a).all() for a in sent.tensors.values())

    def test_the_very_first_task_with_a_single_class_learns_by_the_pull_term(self, backbone):
        task = make_tasks([6])
        parts, images = hand_made(task), toy_images({6: 8})
        ctx = context(backbone, task=task[0], epochs=20, lr_lora=0.0, augment="none")
        sent = learn(ctx, parts, images)
        before, after = (
            np.linalg.norm(p.tensors["proto"][0] - sent.tensors["mean"][0])
            for p in (parts["task/0"], sent)
        )
        assert after < 0.98 * before

    @pytest.mark.parametrize("name", ["current", "task/1", "task/2", "lora/1"])
    def test_a_broadcast_that_lacks_a_part_is_refused(self, backbone, name):
        parts = hand_made(TASKS)
        del parts[name]
        with pytest.raises(SchemaMismatch, match=f"'{name}'"):
            learn(context(backbone), parts)

    def test_its_own_state_passes_through(self, backbone):
        state = State({"kept": np.zeros(1, np.float32)})
        assert Learner().run(context(backbone), state, hand_made(TASKS), IMAGES)[0] is state


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"classes": [1, 0]}, "'classes': expected [0, 1]"),
        ({"count": [3, -2]}, "'count' holds a negative number"),
        ({"n": [6]}, "'n': expected 5, the sum of 'count', got 6"),
        ({"owned": [0, 5]}, "'owned': expected the classes with at least 1 images"),
        ({"owned": [1, 1]}, "'owned'"),
    ],
)
def test_contradictions_in_an_upload_are_named(change, part):
    fed = Federation.of("plora", [toy_images({0: 3, 1: 2})], rank=RANK, blocks=[0], epochs=1)
    fed.open(make_tasks([0, 1])[0])
    payload = fed.upload("train", 0)
    altered = {k: np.array(v, dtype=np.int64) for k, v in change.items()}
    check = fed.exchanges[-1].check
    assert any(part in f for f in check(Payload({**payload.tensors, **altered}), fed.task))
    assert check(payload, replace(fed.task)) == []
