"""PILoRA's client half against the float64 definition, and what must hold on any client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import DIM, Federation, make_tasks, toy_backbone, toy_images
from adapters.pilora_reference import (
    RANK,
    effective_delta,
    features,
    hand_made,
    hand_made_part,
    in_order,
    inference_features,
    objective,
    task_pairs,
)
from fcil_adapters.contract import Context, State
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.pilora import METHOD
from fcil_adapters.methods.pilora.learner import Learner
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
IMAGES = toy_images({5: 7, 9: 4}, seed=1)
FAST = {"rank": RANK, "epochs": 2, "batch_size": 4, "lr_prototype": 1e-2, "lr_lora": 1e-2}


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def broadcast(count: int = 3, future: int = 0, **kw) -> dict[str, Payload]:
    """Parts of ``count`` tasks; class 2 of task 1 was never seen by anybody."""
    return hand_made(
        [hand_made_part(t, TASKS[t].classes, seed=t, unseen=(2,), **kw) for t in range(count)],
        future,
    )


def context(backbone, kind="train", task=TASKS[2], **kw) -> Context:
    extra = {
        k: kw.pop(k) for k in ("micro_batch", "seed", "progress", "round", "rounds") if k in kw
    }
    h = make_hparams(METHOD, {**FAST, **kw})
    start = {"round": 0, "rounds": 3, "seed": (1, 2), **extra}
    return Context(kind, task, hparams=h, backbone_info=backbone.info, backbone=backbone, **start)


def learn(ctx, parts=None, images=IMAGES) -> Payload:
    return Learner().run(ctx, State(), broadcast() if parts is None else parts, images)[1]


class TestObjective:
    """The loss that the learner reports for its first step, before anything has moved."""

    def first_loss(self, backbone, parts, images=IMAGES, **kw) -> float:
        seen = []
        ctx = context(backbone, progress=seen.append, augment="none", batch_size=64, **kw)
        learn(ctx, parts, images)
        return seen[0].loss

    @pytest.mark.parametrize("dce", ["rms", "sq", "sq_over_d"])
    def test_equals_the_definition(self, backbone, dce):
        terms = {"dce": dce, "delta": 0.7, "lambda_pl": 0.3, "gamma_ort": 0.2, "l1": 0.05}
        parts = broadcast()
        f = inference_features(backbone, in_order(parts), IMAGES)
        expected = objective(f, in_order(parts), IMAGES.labels, **terms)
        assert self.first_loss(backbone, parts, **terms) == pytest.approx(expected, rel=1e-5)

    def test_several_blocks_and_a_scale_enter_everywhere(self, backbone):
        parts = broadcast(blocks=(0, 1))
        f = inference_features(backbone, in_order(parts), IMAGES, blocks=(0, 1), scale=0.5)
        expected = objective(f, in_order(parts), IMAGES.labels, blocks=(0, 1), l1=0.01)
        got = self.first_loss(backbone, parts, blocks=(0, 1), scale=0.5, l1=0.01)
        assert got == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(
        "compose", ["sum_of_products", "product_of_sums", "task0_plus_current"]
    )
    def test_training_features_are_those_of_inference(self, backbone, compose):
        parts = broadcast()
        f = inference_features(backbone, in_order(parts), IMAGES, compose=compose)
        expected = objective(f, in_order(parts), IMAGES.labels)
        assert self.first_loss(backbone, parts, compose=compose) == pytest.approx(
            expected, rel=1e-5
        )

    def test_task0_only_trains_beside_the_first_lora(self, backbone):
        parts = broadcast()
        pairs = {p: task_pairs(in_order(parts), 0, p) for p in ("q", "v")}
        deltas = {
            (0, p): effective_delta("sum_of_products", [x[0], x[2]]) for p, x in pairs.items()
        }
        expected = objective(features(backbone, deltas, IMAGES), in_order(parts), IMAGES.labels)
        assert self.first_loss(backbone, parts, compose="task0_only") == pytest.approx(
            expected, rel=1e-5
        )

    @pytest.mark.parametrize("compose", ["sum_of_products", "product_of_sums", "task0_only"])
    def test_current_only_trains_without_past_loras(self, backbone, compose):
        parts = broadcast()
        f = inference_features(backbone, in_order(parts)[-1:], IMAGES)
        expected = objective(f, in_order(parts), IMAGES.labels)
        got = self.first_loss(backbone, parts, compose=compose, train_with="current_only")
        assert got == pytest.approx(expected, rel=1e-5)

    def test_candidates_all_adds_the_classes_still_to_come(self, backbone):
        parts = broadcast(future=4)
        f = inference_features(backbone, in_order(parts), IMAGES)
        expected = objective(f, in_order(parts), IMAGES.labels)
        got = self.first_loss(backbone, parts, candidates="all", total_classes=10)
        assert got == pytest.approx(expected, rel=1e-5)
        assert got != pytest.approx(self.first_loss(backbone, broadcast()), rel=1e-3)

    def test_a_client_without_one_of_the_classes_still_has_its_column(self, backbone):
        images, parts = IMAGES.of([9]), broadcast()
        f = inference_features(backbone, in_order(parts), images)
        expected = objective(f, in_order(parts), images.labels)
        assert self.first_loss(backbone, parts, images) == pytest.approx(expected, rel=1e-5)


class TestTraining:
    def test_changes_the_current_lora_and_prototypes(self, backbone):
        parts, sent = broadcast(), learn(context(backbone))
        for name, before in parts["task/2"].tensors.items():
            if name.startswith("lora.") or name == "proto":
                assert not np.array_equal(sent.tensors[name], before), name

    def test_reduces_its_objective(self, backbone):
        seen = []
        learn(context(backbone, progress=seen.append, epochs=20, lr_prototype=0.1, augment="none"))
        losses = [p.loss for p in seen]
        assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])

    def test_the_same_context_gives_the_same_bytes(self, backbone):
        torch.manual_seed(1)
        one = pack(learn(context(backbone)))
        torch.manual_seed(2)
        assert pack(learn(context(backbone))) == one

    @pytest.mark.parametrize(
        "other", [{"seed": (1, 3)}, {"round": 1}, {"task": replace(TASKS[2], index=3)}]
    )
    def test_another_client_round_or_task_draws_other_batches(self, backbone, other):
        flat = {"schedule": "constant"}
        one, two = learn(context(backbone, **flat)), learn(context(backbone, **flat, **other))
        assert not np.array_equal(one.tensors["proto"], two.tensors["proto"])

    @pytest.mark.parametrize("micro", [1, 3, 4, 100])
    def test_micro_batches_give_the_same_effective_batch(self, backbone, micro):
        whole = learn(context(backbone))
        split = learn(context(backbone, micro_batch=micro))
        for name in ("proto", "mean", "lora.0.q.A", "lora.0.v.B"):
            np.testing.assert_allclose(split.tensors[name], whole.tensors[name], atol=2e-4)
        assert split.tensors["count"].tolist() == whole.tensors["count"].tolist()

    def test_lr_lora_zero_freezes_lora_alone(self, backbone):
        parts, sent = broadcast(), learn(context(backbone, lr_lora=0.0))
        for name in sent.tensors:
            if name.startswith("lora."):
                np.testing.assert_array_equal(sent.tensors[name], parts["task/2"].tensors[name])
        assert not np.array_equal(sent.tensors["proto"], parts["task/2"].tensors["proto"])

    def test_orthogonality_shrinks_the_overlap_with_past_a(self, backbone):
        def overlap(gamma):
            sent = learn(context(backbone, gamma_ort=gamma, epochs=6))
            past = broadcast()["task/0"].tensors["lora.0.q.A"]
            return np.abs(past @ sent.tensors["lora.0.q.A"].T).sum()

        assert overlap(0.5) < 0.9 * overlap(0.0)

    def test_l1_shrinks_a(self, backbone):
        size = [
            np.abs(learn(context(backbone, l1=v, gamma_ort=0.0)).tensors["lora.0.q.A"]).sum()
            for v in (0.0, 1.0)
        ]
        assert size[1] < size[0]

    def test_weight_decay_pulls_prototypes_towards_zero(self, backbone):
        size = [
            np.square(learn(context(backbone, weight_decay=v)).tensors["proto"]).sum()
            for v in (0.0, 5.0)
        ]
        assert size[1] < size[0]

    def test_the_first_adam_step_is_the_learning_rate(self, backbone):
        """Adam starts anew each round, so a single step moves each entry by the step size."""
        parts = broadcast()
        one_step = {"epochs": 1, "batch_size": 64, "lr_prototype": 1e-3}
        for round_, factor in ((0, 1.0), (1, 0.75), (2, 0.25)):
            sent = learn(context(backbone, round=round_, **one_step))
            moved = np.abs(sent.tensors["proto"] - parts["task/2"].tensors["proto"])
            assert np.median(moved) == pytest.approx(1e-3 * factor, rel=1e-2)

    def test_the_option_chooses_the_schedule(self, backbone):
        parts = broadcast()
        one_step = {"epochs": 1, "batch_size": 64, "lr_prototype": 1e-3}
        for schedule, factor in (("cosine", 0.75), ("cosine_repeat", 1.0), ("constant", 1.0)):
            sent = learn(context(backbone, round=1, schedule=schedule, **one_step))
            moved = np.abs(sent.tensors["proto"] - parts["task/2"].tensors["proto"])
            assert np.median(moved) == pytest.approx(1e-3 * factor, rel=1e-2)

    def test_the_option_chooses_the_views(self, backbone):
        sent = [learn(context(backbone, augment=a)).tensors["proto"] for a in
                ("none", "jitter", "flip_jitter")]  # fmt: skip
        assert not np.array_equal(sent[0], sent[1])
        assert not np.array_equal(sent[1], sent[2])

    def test_progress_counts_every_step(self, backbone):
        seen = []
        learn(context(backbone, progress=seen.append))
        assert [p.done for p in seen] == list(range(1, 7))  # 11 images in batches of 4, twice
        assert {p.total for p in seen} == {6}

    def test_its_own_state_passes_through(self, backbone):
        state = State({"kept": np.zeros(1, np.float32)})
        assert Learner().run(context(backbone), state, broadcast(), IMAGES)[0] is state


class TestMeans:
    def test_are_the_class_means_of_the_trained_model_on_plain_images(self, backbone):
        parts, sent = broadcast(), learn(context(backbone))
        lora = {n: a for n, a in sent.tensors.items() if n.startswith("lora.")}
        trained = [*in_order(parts)[:2], Payload(lora)]
        f = inference_features(backbone, trained, IMAGES).numpy()
        for row, c in enumerate((5, 9)):
            np.testing.assert_allclose(
                sent.tensors["mean"][row], f[IMAGES.labels == c].mean(0), atol=1e-4
            )
        assert sent.tensors["owned"].tolist() == [5, 9]

    def test_from_training_are_those_of_all_epochs(self, backbone):
        """With a model that does not move and plain views, both ways give the same means."""
        still = {"lr_lora": 0.0, "augment": "none"}
        one = learn(context(backbone, **still))
        other = learn(context(backbone, mean_from="training", **still))
        np.testing.assert_allclose(other.tensors["mean"], one.tensors["mean"], atol=1e-5)
        assert other.tensors["count"].tolist() == [7, 4]
        moving = learn(context(backbone, mean_from="training"))
        assert np.abs(moving.tensors["mean"] - one.tensors["mean"]).max() > 1e-3

    def test_stay_at_home_below_the_minimum_count(self, backbone):
        sent = learn(context(backbone, min_count_upload=5))
        assert sent.tensors["owned"].tolist() == [5]
        assert sent.tensors["mean"].shape == (1, DIM)
        assert sent.tensors["count"].tolist() == [7, 4]

    def test_prepare_sends_means_of_the_model_as_the_task_opens_and_nothing_else(self, backbone):
        parts = broadcast()
        sent = learn(context(backbone, kind="prepare"), parts)
        assert sorted(sent.tensors) == ["classes", "count", "mean", "n", "owned"]
        f = inference_features(backbone, in_order(parts), IMAGES).numpy()
        np.testing.assert_allclose(
            sent.tensors["mean"][0], f[IMAGES.labels == 5].mean(0), atol=1e-4
        )


class TestEdges:
    def test_no_images(self, backbone):
        parts = broadcast()
        for kind in ("prepare", "train"):
            sent = learn(context(backbone, kind=kind), parts, IMAGES.of([]))
            assert sent.tensors["n"].tolist() == [0]
            assert sent.tensors["mean"].shape == (0, DIM)
        np.testing.assert_array_equal(sent.tensors["proto"], parts["task/2"].tensors["proto"])

    def test_one_image(self, backbone):
        images = toy_images({9: 1})
        sent = learn(context(backbone, mean_from="training"), images=images)
        assert sent.tensors["count"].tolist() == [0, 1]
        assert np.isfinite(sent.tensors["proto"]).all()

    def test_batches_of_one(self, backbone):
        sent = learn(context(backbone, batch_size=1))
        assert all(np.isfinite(a).all() for a in sent.tensors.values())

    def test_the_very_first_task_with_a_single_class_learns_by_the_pull_term(self, backbone):
        task = make_tasks([6])[0]
        images, parts = toy_images({6: 8}), hand_made([hand_made_part(0, [6], seed=0)])
        ctx = context(backbone, task=task, epochs=20, lr_lora=0.0, augment="none", batch_size=64)
        sent = learn(ctx, parts, images)
        before, after = (
            np.linalg.norm(p.tensors["proto"][0] - sent.tensors["mean"][0])
            for p in (parts["task/0"], sent)
        )
        assert after < 0.98 * before

    def test_a_broadcast_without_a_finished_task_is_refused(self, backbone):
        parts = broadcast()
        del parts["task/1"]
        with pytest.raises(SchemaMismatch, match="'task/1'"):
            learn(context(backbone), parts)
        with pytest.raises(SchemaMismatch, match="'current'"):
            learn(context(backbone), {})


class TestUploadRules:
    def faults(self, **change):
        fed = Federation.of("pilora", [toy_images({0: 3, 1: 2})], rank=RANK, epochs=1)
        fed.open(make_tasks([0, 1])[0])
        payload = fed.upload("train", 0)
        check = next(e for e in fed.exchanges if e.kind == "train").check
        altered = {k: np.array(v, dtype=np.int64) for k, v in change.items()}
        return check(Payload({**payload.tensors, **altered}), fed.task)

    def test_an_honest_upload_has_no_fault(self):
        assert self.faults() == []

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"classes": [1, 0]}, "'classes': expected [0, 1]"),
            ({"classes": [0, 0]}, "'classes': expected [0, 1]"),
            ({"count": [3, -2]}, "'count' holds a negative number"),
            ({"n": [6]}, "'n': expected 5, the sum of 'count', got 6"),
            ({"owned": [0, 5]}, "'owned': expected the classes with at least 1 images"),
            ({"owned": [1, 1]}, "'owned'"),
            ({"count": [5, 0]}, "'owned'"),
        ],
    )
    def test_contradictions_are_named(self, change, part):
        assert any(part in fault for fault in self.faults(**change))
