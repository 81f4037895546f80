"""HGP's client half against the float64 definition, and what must hold on any client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.hgp_reference import (
    SMALL,
    cross_entropy,
    hand_made,
    logits,
    prompted_features,
)
from adapters.kit import DIM, make_tasks, now, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Context, State
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.hgp import METHOD
from fcil_adapters.methods.hgp.learner import Learner, _schedule
from fcil_adapters.toolkit.gaussians.batches import unpack_gaussians
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([3, 4], [5, 9])
IMAGES = toy_images({5: 4, 9: 3}, seed=1)
FAST = {**SMALL, "epochs": 2, "batch_size": 4, "lr_prompt": 1e-2, "lr_head": 1e-2, "cov_rank": 2}


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def context(backbone, task=TASKS[1], **kw) -> Context:
    extra = {k: kw.pop(k) for k in ("micro_batch", "seed", "progress") if k in kw}
    h = make_hparams(METHOD, {**FAST, "augment": "jitter", **kw})
    start = {"round": 0, "rounds": 3, "seed": (1, 2), **extra}
    return Context(
        "train", task, hparams=h, backbone_info=backbone.info, backbone=backbone, **start
    )


def learn(ctx, parts=None, images=IMAGES) -> Payload:
    sent = Learner().run(ctx, State(), hand_made(TASKS) if parts is None else parts, images)[1]
    (exchange,) = METHOD.exchanges(ctx.hparams, ctx.backbone_info)
    dims = METHOD.dims(ctx.hparams, ctx.backbone_info, ctx.task)
    assert exchange.upload.check(sent, dims) == []
    assert exchange.check(sent, ctx.task) == []
    return sent


class TestTraining:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"query": "view"},
            {"score": "softmax"},
            {"pool_sharing": "shared"},
            {"pixels": "unit"},
        ],
        ids=str,
    )
    def test_the_first_loss_is_the_cross_entropy_over_the_tasks_own_classes(
        self, backbone, options
    ):
        shared = options.get("pool_sharing") == "shared"
        parts = hand_made(TASKS, pools=("shared",) if shared else ("0", "1"))
        seen = []
        ctx = context(backbone, augment="none", batch_size=64, progress=seen.append, **options)
        learn(ctx, parts)
        score, unit = options.get("score", "cosine"), options.get("pixels") == "unit"
        f = prompted_features(backbone, parts, IMAGES, shared=shared, score=score, unit=unit)
        head = parts["current"].tensors
        scores = logits(f, head["head.weight"][2:], head["head.bias"][2:])
        expected = cross_entropy(scores, (IMAGES.labels == 9).astype(int))
        assert seen[0].loss == pytest.approx(expected, rel=1e-4)
        assert seen[-1].loss < seen[0].loss
        assert [p.done for p in seen] == [1, 2]

    def test_everything_that_is_sent_has_moved(self, backbone):
        parts, sent = hand_made(TASKS), learn(context(backbone))
        for b in (0, 1):
            for name in (f"key.{b}", f"prompt.{b}"):
                assert np.abs(sent.tensors[name] - now(parts)[name]).max() > 1e-3
        old = parts["current"].tensors["head.weight"][2:]
        assert np.abs(sent.tensors["head.weight"] - old).max() > 1e-3

    def test_a_step_of_zero_freezes_the_prompts(self, backbone):
        parts, sent = hand_made(TASKS), learn(context(backbone, lr_prompt=0.0))
        np.testing.assert_array_equal(sent.tensors["prompt.0"], now(parts)["prompt.0"])

    def test_micro_batches_give_the_same_gradient(self, backbone):
        one, many = (learn(context(backbone, micro_batch=m, epochs=1)) for m in (None, 3))
        for name, array in one.tensors.items():
            if not name.startswith("gauss.factor"):  # a factor is known up to its rows' signs
                np.testing.assert_allclose(many.tensors[name], array, atol=2e-4)

    def test_the_query_of_a_view_differs_from_the_canonical_one(self, backbone):
        sent = [
            learn(context(backbone, query=q, augment="crop_flip")) for q in ("canonical", "view")
        ]
        assert np.abs(sent[0].tensors["prompt.0"] - sent[1].tensors["prompt.0"]).max() > 1e-6

    @pytest.mark.parametrize("micro", [None, 3])
    def test_no_step_sees_a_longer_gradient_than_allowed(self, backbone, micro, monkeypatch):
        def lengths(**kw):
            seen = []

            def step(optimiser):
                grads = [p.grad.flatten() for g in optimiser.param_groups for p in g["params"]]
                seen.append(torch.cat(grads).norm().item())

            monkeypatch.setattr(torch.optim.Adam, "step", step)
            learn(context(backbone, micro_batch=micro, **kw))
            return np.array(seen)

        free = lengths()
        bound = float(np.median(free))
        assert free.min() < bound < free.max()
        np.testing.assert_allclose(lengths(clip_norm=bound), np.minimum(free, bound), rtol=1e-4)

    def test_schedule(self):
        h = make_hparams(METHOD, {})
        assert [_schedule(h, s, 4) for s in range(4)] == pytest.approx(
            [1, 0.853553, 0.5, 0.146447], abs=1e-6
        )
        constant = make_hparams(METHOD, {"schedule": "constant"})
        assert [_schedule(constant, s, 4) for s in range(4)] == [1] * 4

    def test_every_step_has_its_factor_of_both_rates(self, backbone, monkeypatch):
        used = []
        monkeypatch.setattr(
            torch.optim.Adam, "step", lambda adam: used.append([g["lr"] for g in adam.param_groups])
        )
        learn(context(backbone, lr_prompt=2.0, lr_head=6.0))  # 7 images in batches of 4, twice
        factors = np.array([1, 0.853553, 0.5, 0.146447])
        np.testing.assert_allclose(used, np.outer(factors, [2, 6]), rtol=1e-5)

    def test_same_context_same_bytes_and_another_seed_others(self, backbone):
        one, same = (learn(context(backbone)) for _ in range(2))
        other = learn(context(backbone, seed=(1, 3)))
        assert pack(one) == pack(same)
        assert pack(one) != pack(other)

    def test_the_backbone_stays_bit_equal_and_the_state_passes_through(self, backbone):
        state = State({"kept": np.zeros(1, np.float32)})
        kept, _ = Learner().run(context(backbone), state, hand_made(TASKS), IMAGES)
        assert kept is state
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest


class TestGaussians:
    @pytest.mark.parametrize("cov", ["lowrank", "full", "diag"])
    def test_describe_the_trained_local_model_on_plain_images(self, backbone, cov):
        parts = hand_made(TASKS)
        sent = learn(context(backbone, cov=cov, augment="crop_flip"), parts)
        trained = {n: a for n, a in sent.tensors.items() if n.startswith(("key", "prompt"))}
        local = {**parts, "task/1": Payload(trained, {"task": 1})}
        f = prompted_features(backbone, local, IMAGES)
        got = unpack_gaussians(sent, [4, 3], cov, 2)
        assert sent.tensors["count"].tolist() == [4, 3]
        for c, g in zip((5, 9), got, strict=True):
            x = f[IMAGES.labels == c]
            S = np.cov(x, rowvar=False)
            np.testing.assert_allclose(g.mean, x.mean(0), atol=1e-4)
            if cov == "full":
                np.testing.assert_allclose(g.covariance(), S, atol=1e-4)
            np.testing.assert_allclose(np.diag(g.covariance()), np.diag(S), atol=1e-4)

    def test_those_of_rare_classes_stay_at_home(self, backbone):
        sent = learn(context(backbone, min_count_upload=4))
        assert sent.tensors["gauss.mean"].shape == (1, DIM)
        assert sent.tensors["count"].tolist() == [4, 3]

    def test_one_image_has_a_mean_and_no_covariance(self, backbone):
        images = toy_images({9: 1})
        sent = learn(context(backbone), images=images)
        assert sent.tensors["gauss.mean"].shape == (1, DIM)
        assert not sent.tensors["gauss.rest"].any()
        assert sent.tensors["gauss.factor"].shape == (0, DIM)
        assert sent.tensors["count"].tolist() == [0, 1]


class TestEdges:
    @pytest.mark.parametrize("cov", ["lowrank", "full", "diag"])
    @pytest.mark.parametrize("query", ["canonical", "view"])
    def test_no_images_change_nothing(self, backbone, cov, query):
        parts = hand_made(TASKS)
        sent = learn(context(backbone, cov=cov, query=query), parts, IMAGES.of([]))
        assert sent.tensors["n"].tolist() == [0]
        assert sent.tensors["gauss.mean"].shape == (0, DIM)
        np.testing.assert_array_equal(sent.tensors["prompt.1"], now(parts)["prompt.1"])

    def test_one_class_of_two_is_trained_against_the_other(self, backbone):
        parts = hand_made(TASKS)
        sent = learn(context(backbone, epochs=10), parts, IMAGES.of([5]))
        moved = sent.tensors["head.bias"] - parts["current"].tensors["head.bias"][2:]
        assert moved[0] > 0 > moved[1]

    @pytest.mark.parametrize("task", [make_tasks([6])[0], make_tasks([3, 4], [6])[1]])
    def test_a_task_of_one_class_sends_its_gaussian_and_leaves_the_prompts(self, backbone, task):
        tasks = make_tasks([3, 4], [6]) if task.index else [task]
        parts, seen = hand_made(tasks), []
        ctx = context(backbone, task=task, progress=seen.append)
        sent = learn(ctx, parts, toy_images({6: 5}))
        for name in ("prompt.0", "key.1"):
            np.testing.assert_array_equal(sent.tensors[name], now(parts)[name])
        assert sent.tensors["gauss.mean"].shape == (1, DIM)
        assert (seen[-1].done, seen[-1].total) == (5, 5)

    def test_a_broadcast_without_a_finished_task_is_refused(self, backbone):
        parts = hand_made(TASKS)
        del parts["task/0"]
        with pytest.raises(SchemaMismatch, match="'task/0'"):
            learn(context(backbone), parts)
        with pytest.raises(SchemaMismatch, match="'current'"):
            learn(context(backbone), {})


class TestUploadRules:
    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"classes": [9, 5]}, "'classes': expected [5, 9]"),
            ({"classes": [5, 5]}, "'classes': expected [5, 9]"),
            ({"count": [9, -2]}, "'count' holds a negative number"),
            ({"n": [6]}, "'n': expected 7, the sum of 'count', got 6"),
            ({"count": [7, 0]}, "'gauss.mean': the counts ask for 1 rows, got 2"),
            ({"count": [6, 1]}, "'gauss.factor': the counts ask for 2 rows, got 4"),
        ],
    )
    def test_contradictions_are_named(self, backbone, change, part):
        ctx = context(backbone, epochs=1)
        sent = learn(ctx)
        (exchange,) = METHOD.exchanges(ctx.hparams, backbone.info)
        altered = {k: np.array(v, dtype=np.int64) for k, v in change.items()}
        faults = exchange.check(replace(sent, tensors={**sent.tensors, **altered}), ctx.task)
        assert any(part in fault for fault in faults)
