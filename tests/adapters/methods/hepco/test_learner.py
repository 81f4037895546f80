"""HePCo's client half and its composed model against the float64 definition; small federations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.hepco_reference import SMALL, client_loss, features
from adapters.kit import DIM, Federation, make_tasks, now, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Context, State
from fcil_adapters.contract.registry import make_hparams, schema_digest
from fcil_adapters.methods.hepco import METHOD
from fcil_adapters.methods.hepco.learner import Learner
from fcil_adapters.methods.hepco.model import Model
from fcil_adapters.toolkit.prompts.client import schedule_factor
from fcil_protocol.errors import ConfigError, SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack, unpack

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
IMAGES = toy_images({5: 7, 9: 4}, seed=1)
POOLS = ("prompt.0", "key.0", "prompt.1", "key.1")


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def broadcast(count: int = 3, unseen=(2,)) -> dict[str, Payload]:
    """A model over ``count`` tasks whose prompts and rows do something."""
    rng = np.random.default_rng(count)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def about(task):
        return {
            "classes": np.array(task.classes, dtype=np.int64),
            "seen": np.array([c not in unseen for c in task.classes], dtype=np.int64),
        }

    parts = {f"task/{t}": Payload(about(TASKS[t]), {"task": t}) for t in range(count - 1)}
    pools = {f"prompt.{b}": draw(3, 4, DIM) for b in (0, 1)}
    pools |= {f"key.{b}": draw(3, DIM) for b in (0, 1)}
    head = {"head.weight": 0.3 * draw(2 * count, DIM), "head.bias": draw(2 * count)}
    parts["pools"] = Payload(pools)
    parts["current"] = Payload({**head, **about(TASKS[count - 1])}, {"task": count - 1})
    return parts


def context(backbone, kind="train", task=TASKS[2], **kw) -> Context:
    extra = {
        k: kw.pop(k) for k in ("micro_batch", "seed", "progress", "round", "rounds") if k in kw
    }
    h = make_hparams(METHOD, {**SMALL, "epochs": 2, **kw})
    start = {"round": 0, "rounds": 3, "seed": (1, 2), **extra}
    return Context(kind, task, hparams=h, backbone_info=backbone.info, backbone=backbone, **start)


def learn(ctx, parts=None, images=IMAGES) -> Payload:
    return Learner().run(ctx, State(), broadcast() if parts is None else parts, images)[1]


class TestObjective:
    @pytest.mark.parametrize("options", [{}, {"pixels": "unit"}, {"query": "view"}], ids=str)
    def test_first_loss_is_the_cross_entropy_over_the_tasks_own_classes(self, backbone, options):
        seen = []
        learn(context(backbone, progress=seen.append, batch_size=64, **options))
        model = now(broadcast())
        _, f = features(backbone, IMAGES, model, (0, 1), unit=options.get("pixels") == "unit")
        expected = client_loss(
            f, model["head.weight"][4:], model["head.bias"][4:], IMAGES.labels, (5, 9)
        )
        assert seen[0].loss == pytest.approx(expected, rel=1e-4)

    def test_a_client_with_one_of_the_classes_still_has_both_columns(self, backbone):
        seen = []
        images = IMAGES.of([9])
        learn(context(backbone, progress=seen.append, batch_size=64), images=images)
        model = now(broadcast())
        _, f = features(backbone, images, model, (0, 1))
        expected = client_loss(
            f, model["head.weight"][4:], model["head.bias"][4:], images.labels, (5, 9)
        )
        assert seen[0].loss == pytest.approx(expected, rel=1e-4)

    def test_queries_of_views_differ_from_canonical_ones(self, backbone):
        sent = [
            learn(context(backbone, query=q, augment="crop_flip")).tensors["key.0"]
            for q in ("view", "canonical")
        ]
        assert not np.array_equal(*sent)


class TestTraining:
    def test_changes_pools_keys_and_the_tasks_rows(self, backbone):
        model, sent = now(broadcast()), learn(context(backbone)).tensors
        for name in POOLS:
            assert not np.array_equal(sent[name], model[name]), name
        assert sent["head.weight"].shape == (2, DIM)
        assert not np.array_equal(sent["head.weight"], model["head.weight"][4:])
        assert sent["count"].tolist() == [7, 4]
        assert sent["n"].tolist() == [11]

    def test_reduces_its_objective(self, backbone):
        seen = []
        learn(context(backbone, progress=seen.append, epochs=25, schedule="constant"))
        losses = [p.loss for p in seen]
        assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])

    def test_the_backbone_stays_bit_equal(self, backbone):
        for pixels in ("normalised", "unit"):
            learn(context(backbone, pixels=pixels))
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest
        assert not any(p.requires_grad or p.grad is not None for p in backbone.module.parameters())

    def test_the_same_context_gives_the_same_bytes(self, backbone):
        torch.manual_seed(1)
        one = pack(learn(context(backbone, augment="crop_flip")))
        torch.manual_seed(2)
        assert pack(learn(context(backbone, augment="crop_flip"))) == one

    @pytest.mark.parametrize("other", [{"seed": (1, 3)}, {"round": 1}])
    def test_another_client_or_round_draws_other_batches(self, backbone, other):
        one, two = learn(context(backbone)), learn(context(backbone, **other))
        assert not np.array_equal(one.tensors["head.weight"], two.tensors["head.weight"])

    @pytest.mark.parametrize("query", ["canonical", "view"])
    def test_micro_batches_give_the_same_effective_batch(self, backbone, query):
        whole = learn(context(backbone, query=query))
        split = learn(context(backbone, query=query, micro_batch=3))
        for name in (*POOLS, "head.weight"):
            np.testing.assert_allclose(split.tensors[name], whole.tensors[name], atol=1e-3)

    def test_steps_follow_the_schedule(self, backbone):
        h = make_hparams(METHOD, {"epochs": 10})
        factors = [schedule_factor(h, e) for e in range(10)]
        expected = [math.cos(99 * math.pi * e / (200 * 9)) for e in range(10)]
        assert factors == pytest.approx(expected)
        assert factors[0] == 1
        assert factors[-1] == pytest.approx(0.0157, abs=1e-4)
        for options in ({"epochs": 1}, {"schedule": "constant"}):
            assert schedule_factor(make_hparams(METHOD, options), 0) == 1

    def test_every_step_of_an_epoch_has_its_factor(self, backbone, monkeypatch):
        used = []
        monkeypatch.setattr(
            torch.optim.Adam, "step", lambda adam: used.append(adam.param_groups[0]["lr"])
        )
        learn(context(backbone, epochs=3, lr=2.0))  # 11 images in batches of 4
        factors = [1, math.cos(99 * math.pi / 400), math.cos(99 * math.pi / 200)]
        assert used == pytest.approx([2 * f for f in factors for _ in range(3)])

    def test_the_first_adam_step_is_the_learning_rate(self, backbone):
        sent = learn(context(backbone, epochs=1, batch_size=64, lr=1e-3))
        moved = np.abs(sent.tensors["prompt.1"] - now(broadcast())["prompt.1"])
        assert np.median(moved) == pytest.approx(1e-3, rel=1e-2)

    def test_progress_counts_every_step(self, backbone):
        seen = []
        learn(context(backbone, progress=seen.append))
        assert [p.done for p in seen] == list(range(1, 7))  # 11 images in batches of 4, twice
        assert {p.total for p in seen} == {6}


class TestEdges:
    def test_no_images(self, backbone):
        parts, sent = broadcast(), learn(context(backbone), images=IMAGES.of([]))
        assert sent.tensors["n"].tolist() == [0]
        for name in POOLS:
            np.testing.assert_array_equal(sent.tensors[name], now(parts)[name])

    def test_one_image(self, backbone):
        sent = learn(context(backbone), images=toy_images({9: 1}))
        assert sent.tensors["count"].tolist() == [0, 1]
        assert all(np.isfinite(a).all() for a in sent.tensors.values())

    def test_counts_may_be_withheld(self, backbone):
        sent = learn(context(backbone, send_counts=False)).tensors
        assert "count" not in sent
        assert sent["n"].tolist() == [11]

    @pytest.mark.parametrize("count", [5, 0])
    def test_a_single_class_sends_its_mean_prompted_feature(self, backbone, count):
        model = broadcast()["pools"].tensors
        rows = {"head.weight": np.ones((1, DIM), np.float32), "head.bias": np.ones(1, np.float32)}
        about = {"classes": np.array([6]), "seen": np.array([0])}
        parts = {"pools": Payload(model), "current": Payload({**rows, **about}, {"task": 0})}
        images = toy_images({6: count})
        sent = learn(context(backbone, task=make_tasks([6])[0]), parts, images).tensors
        for name in POOLS:
            np.testing.assert_array_equal(sent[name], model[name])
        expected = features(backbone, images, model, (0, 1))[1].mean(0) if count else np.zeros(DIM)
        np.testing.assert_allclose(sent["head.weight"][0], expected, atol=1e-4)
        assert sent["head.bias"].tolist() == [0]

    def test_a_broadcast_without_a_finished_task_is_refused(self, backbone):
        parts = broadcast()
        del parts["task/1"]
        with pytest.raises(SchemaMismatch, match="'task/1'"):
            learn(context(backbone), parts)
        for name in ("current", "pools"):
            with pytest.raises(SchemaMismatch, match=f"'{name}'"):
                learn(context(backbone), {n: p for n, p in broadcast().items() if n != name})

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({}, None),
            ({"classes": [1, 0]}, "'classes': expected [0, 1]"),
            ({"count": [7, -2]}, "'count' holds a negative number"),
            ({"n": [6]}, "'n': expected 5, the sum of 'count', got 6"),
            ({"withheld": [1]}, None),
            ({"withheld": [1], "classes": [1, 0]}, "'classes': expected [0, 1]"),
            ({"withheld": [1], "classes": [0, 0]}, "'classes': expected [0, 1], got [0, 0]"),
        ],
    )
    def test_contradictions_in_an_upload_are_named(self, change, part):
        change = dict(change)
        extra = {"send_counts": not change.pop("withheld", None)}
        fed = Federation.of("hepco", [toy_images({0: 3, 1: 2})], **{**SMALL, **extra})
        fed.open(make_tasks([0, 1])[0])
        payload = fed.upload("train", 0)
        altered = {k: np.array(v, dtype=np.int64) for k, v in change.items()}
        faults = fed.exchanges[0].check(Payload({**payload.tensors, **altered}), fed.task)
        assert (faults == []) if part is None else any(part in fault for fault in faults)


class TestModel:
    def compose(self, backbone, parts=None, **kw):
        ctx = context(backbone, "evaluate", **kw)
        return Model().compose(ctx, broadcast() if parts is None else parts, backbone)

    @pytest.mark.parametrize("pixels", ["normalised", "unit"])
    def test_scores_are_those_of_the_prompted_transformer(self, backbone, pixels):
        model = now(broadcast())
        _, f = features(backbone, IMAGES, model, (0, 1), unit=pixels == "unit")
        seen = [0, 1, 2, 4, 5]  # class 2 is the fourth row
        expected = f @ model["head.weight"][seen].T.astype(np.float64) + model["head.bias"][seen]
        predictor = self.compose(backbone, pixels=pixels)
        assert predictor.classes == (3, 4, 7, 5, 9)
        np.testing.assert_allclose(predictor.logits(IMAGES.pictures), expected, atol=1e-3)

    def test_micro_batches_no_images_and_no_classes(self, backbone):
        whole = self.compose(backbone).logits(IMAGES.pictures)
        split = self.compose(backbone, micro_batch=2).logits(IMAGES.pictures)
        np.testing.assert_allclose(split, whole, atol=1e-4)
        assert self.compose(backbone).logits(IMAGES.pictures[:0]).shape == (0, 5)
        nothing = self.compose(backbone, broadcast(1, unseen=(3, 4)))
        assert nothing.classes == ()
        assert nothing.logits(IMAGES.pictures).shape == (11, 0)

    def test_a_late_client_predicts_the_same_from_bytes(self, backbone):
        received = {name: unpack(pack(p)) for name, p in broadcast().items()}
        late = replace(context(backbone, "evaluate"), seed=(77,), backbone=None)
        there = Model().compose(late, received, toy_backbone())
        here = self.compose(backbone)
        np.testing.assert_array_equal(there.logits(IMAGES.pictures), here.logits(IMAGES.pictures))


class TestOptions:
    def test_presets_are_the_papers_letter_and_the_published_code(self):
        paper, repo = (make_hparams(METHOD, {"preset": p}) for p in ("paper", "repo"))
        assert (paper.detach_query, paper.mse_reduction, paper.kl) == (
            False, "mean", "student_teacher",
        )  # fmt: skip
        assert (paper.weights, paper.labels, paper.send_counts) == ("none", "uniform", False)
        assert (paper.old_generator_steps(4), paper.batch_norm) == (100, False)
        assert [schedule_factor(paper, e) for e in (0, 9)] == [1, 1]
        assert (repo.detach_query, repo.mse_reduction, repo.kl) == (True, "sum", "teacher_student")
        assert (repo.weights, repo.labels, repo.lr) == ("repo", "counts", 5e-3)
        assert (repo.old_generator_steps(4), repo.batch_norm) == (300, True)
        steps = [np.cos(99 * np.pi * e / 1800) for e in (0, 0, 1, 8)]
        np.testing.assert_allclose([schedule_factor(repo, e) for e in (0, 1, 2, 9)], steps)
        for h in (paper, repo):
            assert (h.query, h.pixels, h.average, h.replay_ratio) == (
                "view",
                "unit",
                "uniform",
                0.5,
            )

    def test_inputs_are_plain_unless_asked_otherwise(self):
        assert make_hparams(METHOD, {}).pixels == "unit"

    def test_an_undetached_sum_is_refused(self):
        with pytest.raises(ConfigError, match="drives the latents away from their classes"):
            make_hparams(METHOD, {"detach_query": False})

    @pytest.mark.parametrize(
        "options",
        [{"blocks": [0, 0]}, {"blocks": [-1]}, {"hidden": [0, 4]}, {"prompt_length": 3},
         {"server_batch_size": 1}],
        ids=str,
    )  # fmt: skip
    def test_wrong_values_are_named(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_hparams(METHOD, options)

    def test_a_block_that_the_backbone_lacks_is_named(self, backbone):
        for schemas in (METHOD.exchanges, METHOD.broadcast):
            with pytest.raises(ConfigError, match="block 2 does not exist.*blocks 0 to 1"):
                schemas(make_hparams(METHOD, {}), backbone.info)

    def test_old_steps_and_batches(self):
        h = make_hparams(METHOD, {})
        assert [h.old_generator_steps(t) for t in (1, 2, 5)] == [150, 200, 350]
        assert make_hparams(METHOD, {"generator_steps": 7}).old_generator_steps(2) == 107
        assert make_hparams(METHOD, {"old_steps": "fixed"}).old_generator_steps(5) == 100
        assert h.old_batch == 32
        assert make_hparams(METHOD, {"replay_ratio": 0.0}).old_batch == 0
        assert make_hparams(METHOD, {"replay_ratio": 0.001}).old_batch == 1

    def test_uploads_carry_prompts_keys_rows_and_counts_only(self, backbone):
        h = make_hparams(METHOD, SMALL)
        kinds = {t.kind for e in METHOD.exchanges(h, backbone.info) for t in e.upload.tensors}
        assert kinds == {"prompt", "key", "head", "count"}
        other = make_hparams(METHOD, {**SMALL, "pool_size": 4})
        assert schema_digest(METHOD, h, backbone.info) != schema_digest(
            METHOD, other, backbone.info
        )
