"""Fed-TaLoRA's client half against the float64 definition, and what must hold on any client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.fed_talora_reference import SHAPES, cross_entropy, features, head
from adapters.kit import DIM, Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.contract import Context, Part, State
from fcil_adapters.contract.registry import make_hparams, part_faults
from fcil_adapters.methods.fed_talora import METHOD
from fcil_adapters.methods.fed_talora.learner import Learner
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
SEEN_PAST = [3, 4, 7]  # nobody ever had class 2
IMAGES = toy_images({5: 7, 9: 4}, seed=1)
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 2, "batch_size": 4, "lr_lora": 0.05}


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def hand_made(tasks=TASKS, *, freeze_a=False, one_part=False, modules=tuple(SHAPES)):
    """Parts at the last task: a dense base of version 2, one residual since, LoRA that acts."""
    rng = np.random.default_rng(3)

    def draw(*shape, scale=0.2):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    places = [f"{b}.{m}" for b in (0, 1) for m in modules]
    lora, residual, base = {}, {}, {}
    for place in places:
        out, width = SHAPES[place.split(".")[1]]
        lora[f"lora.{place}.A"], lora[f"lora.{place}.B"] = draw(2, width), draw(out, 2)
        residual[f"{place}.L"], residual[f"{place}.R"] = draw(out, 3), draw(3, width)
        base[place] = draw(out, width, scale=0.05)

    def rows(classes):
        return {
            "head.weight": draw(len(classes), DIM),
            "head.bias": draw(len(classes)),
            "classes": np.array(classes, dtype=np.int64),
            "seen": np.array([c in SEEN_PAST for c in classes], dtype=np.int64),
        }

    fixed = {n: lora.pop(n) for n in list(lora) if freeze_a and n.endswith(".A")}
    last = tasks[-1].index
    meta = {"task": last, "version": 3, "base": 2}
    parts = {
        "base/2": Payload(base, {"version": 2}),
        "residual/3": Payload(residual, {"version": 3}),
    }
    if one_part:
        return {**parts, "current": Payload({**lora, **rows(tasks[-1].seen)}, meta)}
    parts |= {f"task/{t.index}": Payload(rows(t.classes), {"task": t.index}) for t in tasks[:-1]}
    parts["current"] = Payload({**lora, **rows(tasks[-1].classes)}, meta)
    if freeze_a:
        parts["fixed"] = Payload(fixed)
    return parts


def context(backbone, task=TASKS[2], **kw) -> Context:
    extra = {
        k: kw.pop(k) for k in ("micro_batch", "seed", "progress", "round", "rounds") if k in kw
    }
    h = make_hparams(METHOD, {**FAST, **kw})
    start = {"round": 0, "rounds": 3, "seed": (1, 2), **extra}
    return Context(
        "train", task, hparams=h, backbone_info=backbone.info, backbone=backbone, **start
    )


def learn(ctx, parts=None, images=IMAGES) -> Payload:
    return Learner().run(ctx, State(), hand_made() if parts is None else parts, images)[1]


def first_loss(backbone, parts, images=IMAGES, **kw) -> float:
    """The loss that the learner reports for its first step, before anything has moved."""
    seen = []
    learn(
        context(backbone, progress=seen.append, augment="none", batch_size=64, **kw), parts, images
    )
    return seen[0].loss


def test_the_hand_made_parts_follow_the_schemas(backbone):
    for options in ({}, {"freeze_a": True, "residual": "factored"}, {"head_loss": "all"}):
        h = make_hparams(METHOD, {**FAST, **options})
        parts = hand_made(
            freeze_a=options.get("freeze_a", False), one_part=options.get("head_loss") == "all"
        )
        for name, payload in parts.items():
            if h.corrects or not name.startswith(("base", "residual")):
                assert part_faults(METHOD, h, backbone.info, TASKS[2], Part(name, payload)) == []


class TestObjective:
    """All under W + base + L R + B A, with whatever columns the option names."""

    def test_current_classes_alone(self, backbone):
        parts = hand_made()
        f = features(backbone, parts, IMAGES)
        expected = cross_entropy(f, parts, IMAGES.labels, [5, 9])
        assert first_loss(backbone, parts) == pytest.approx(expected, rel=1e-4)

    def test_seen_classes_with_past_rows_frozen(self, backbone):
        parts = hand_made()
        f = features(backbone, parts, IMAGES)
        expected = cross_entropy(f, parts, IMAGES.labels, [5, 9, *SEEN_PAST])
        got = first_loss(backbone, parts, head_loss="seen_frozen")
        assert got == pytest.approx(expected, rel=1e-4)

    def test_all_seen_classes(self, backbone):
        parts = hand_made(one_part=True)
        f = features(backbone, parts, IMAGES)
        expected = cross_entropy(f, parts, IMAGES.labels, [*SEEN_PAST, 5, 9])
        assert first_loss(backbone, parts, head_loss="all") == pytest.approx(expected, rel=1e-4)

    def test_a_client_with_one_class_has_the_tasks_columns_as_usual(self, backbone):
        parts, images = hand_made(), IMAGES.of([9])
        expected = cross_entropy(features(backbone, parts, images), parts, images.labels, [5, 9])
        assert first_loss(backbone, parts, images) == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("modules", [("q", "v"), ("fc2",)])
    def test_other_modules_and_a_scale(self, backbone, modules):
        parts = hand_made(modules=modules)
        f = features(backbone, parts, IMAGES, modules=modules, scale=0.5)
        expected = cross_entropy(f, parts, IMAGES.labels, [5, 9])
        got = first_loss(backbone, parts, modules=modules, scale=0.5)
        assert got == pytest.approx(expected, rel=1e-4)

    def test_fixed_factors_act_like_others(self, backbone):
        parts = hand_made(freeze_a=True)
        f = features(backbone, parts, IMAGES)
        expected = cross_entropy(f, parts, IMAGES.labels, [5, 9])
        # residuals of a run before the option was set would still count
        assert first_loss(backbone, parts, freeze_a=True) == pytest.approx(expected, rel=1e-4)


class TestTraining:
    def test_moves_lora_and_head_and_lowers_the_loss(self, backbone):
        seen, parts = [], hand_made()
        ctx = context(backbone, progress=seen.append, epochs=10, lr_lora=1e-3, augment="none")
        sent = learn(ctx, parts)
        for name, before in parts["current"].tensors.items():
            if name.startswith(("lora.", "head.")):
                assert not np.array_equal(sent.tensors[name], before), name
        assert np.mean([p.loss for p in seen[-3:]]) < np.mean([p.loss for p in seen[:3]])
        assert sent.meta == {"version": 3}

    def test_one_step_is_sgd_by_hand_on_the_head(self, backbone):
        parts = hand_made()
        one = {"epochs": 1, "batch_size": 64, "lr_head": 0.5, "lr_lora": 0.0, "augment": "none"}
        sent = learn(context(backbone, **one), parts)
        f = features(backbone, parts, IMAGES)
        W, b, _, _ = head({"current": parts["current"]})
        z = f @ W.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(f)), (IMAGES.labels == 9).astype(int)] -= 1
        np.testing.assert_allclose(
            sent.tensors["head.weight"], W - 0.5 * p.T @ f / len(f), atol=1e-4
        )
        for name in sent.tensors:
            if name.startswith("lora."):
                np.testing.assert_array_equal(sent.tensors[name], parts["current"].tensors[name])

    def test_momentum_schedule_and_decay_reach_the_optimiser(self, backbone):
        def moved(**kw):
            sent = learn(context(backbone, augment="none", lr_lora=0.0, **kw))
            return sent.tensors["head.weight"] - hand_made()["current"].tensors["head.weight"]

        base = np.abs(moved(momentum=0.0)).sum()
        assert np.abs(moved(momentum=0.9)).sum() > 1.5 * base
        assert not np.allclose(moved(momentum=0.0, weight_decay=1.0), moved(momentum=0.0))
        late = np.abs(moved(momentum=0.0, schedule="cosine", round=2)).sum()
        assert late == pytest.approx(0.25 * base, rel=0.3)

    def test_past_rows_move_with_all_alone_and_unseen_ones_never(self, backbone):
        parts = hand_made(one_part=True)
        sent = learn(context(backbone, head_loss="all"), parts)
        same = (sent.tensors["head.weight"] == parts["current"].tensors["head.weight"]).all(1)
        assert same.tolist() == [False, False, False, True, False, False]
        assert (
            learn(context(backbone, head_loss="seen_frozen")).tensors["head.weight"].shape[0] == 2
        )

    def test_a_frozen_a_stays_and_is_not_sent(self, backbone):
        sent = learn(context(backbone, freeze_a=True), hand_made(freeze_a=True))
        assert {n[-2:] for n in sent.tensors if n.startswith("lora.")} == {".B"}

    def test_the_same_context_gives_the_same_bytes(self, backbone):
        torch.manual_seed(1)
        one = pack(learn(context(backbone)))
        torch.manual_seed(2)
        assert pack(learn(context(backbone))) == one
        assert pack(learn(context(backbone, seed=(1, 3)))) != one

    @pytest.mark.parametrize("micro", [1, 3])
    def test_micro_batches_give_the_same_effective_batch(self, backbone, micro):
        flat = {"lr_lora": 1e-3}
        whole, split = (
            learn(context(backbone, **flat)),
            learn(context(backbone, micro_batch=micro, **flat)),
        )
        for name in ("head.weight", "lora.0.q.A", "lora.1.fc2.B"):
            np.testing.assert_allclose(split.tensors[name], whole.tensors[name], atol=2e-4)


class TestEdges:
    def test_no_images(self, backbone):
        parts = hand_made()
        sent = learn(context(backbone), parts, IMAGES.of([]))
        assert sent.tensors["n"].tolist() == [0]
        for name, array in parts["current"].tensors.items():
            if name.startswith(("lora.", "head.")):
                np.testing.assert_array_equal(sent.tensors[name], array)

    def test_one_image(self, backbone):
        sent = learn(context(backbone, lr_lora=1e-3), images=toy_images({9: 1}))
        assert sent.tensors["count"].tolist() == [0, 1]
        assert all(np.isfinite(a).all() for a in sent.tensors.values())

    def test_a_lone_class_is_answered_with_its_mean_feature_and_nothing_moves(self, backbone):
        tasks = make_tasks([3, 4], [5])
        parts, images = hand_made(tasks), IMAGES.of([5])
        sent = learn(context(backbone, task=tasks[1]), parts, images)
        expected = features(backbone, parts, images).mean(0)
        np.testing.assert_allclose(sent.tensors["mean"][0], expected, atol=1e-3)
        for name, array in parts["current"].tensors.items():
            if name.startswith(("lora.", "head.")):
                np.testing.assert_array_equal(sent.tensors[name], array)

    def test_a_lone_class_with_past_columns_is_learned_as_usual(self, backbone):
        tasks = make_tasks([3, 4], [5])
        ctx = context(backbone, task=tasks[1], head_loss="seen_frozen")
        sent = learn(ctx, hand_made(tasks), IMAGES.of([5]))
        assert "mean" not in sent.tensors
        assert not np.array_equal(
            sent.tensors["head.weight"], hand_made(tasks)["current"].tensors["head.weight"]
        )

    @pytest.mark.parametrize("name", ["current", "task/1", "base/2", "residual/3"])
    def test_a_broadcast_that_lacks_a_part_is_refused(self, backbone, name):
        parts = hand_made()
        del parts[name]
        with pytest.raises(SchemaMismatch, match=f"'{name}'"):
            learn(context(backbone), parts)

    def test_its_own_state_passes_through(self, backbone):
        state = State({"kept": np.zeros(1, np.float32)})
        assert Learner().run(context(backbone), state, hand_made(), IMAGES)[0] is state


class TestUploadRules:
    def fed(self, classes, **kw) -> Federation:
        clients = [toy_images(dict.fromkeys(classes, 3))]
        fed = Federation.of("fed_talora", clients, rank=2, blocks=[0], epochs=1, **kw)
        fed.open(make_tasks(classes)[0])
        return fed

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"classes": [1, 0]}, "'classes': expected [0, 1]"),
            ({"count": [3, -2]}, "'count' holds a negative number"),
            ({"n": [7]}, "'n': expected 6, the sum of 'count', got 7"),
        ],
    )
    def test_contradictions_are_named(self, change, part):
        fed = self.fed((0, 1))
        payload = fed.upload("train", 0)
        altered = {k: np.array(v, dtype=np.int64) for k, v in change.items()}
        check = fed.exchanges[0].check
        assert any(part in f for f in check(Payload({**payload.tensors, **altered}), fed.task))

    def test_a_mean_belongs_to_lone_classes_with_enough_images(self):
        check = self.fed((0, 1)).exchanges[0].check
        fed = self.fed((0,))
        payload = fed.upload("train", 0)
        assert payload.tensors["mean"].shape == (1, DIM)
        bare = Payload({n: a for n, a in payload.tensors.items() if n != "mean"})
        assert "'mean': expected to be there" in fed.exchanges[0].check(bare, fed.task)[0]
        two = make_tasks([0, 1])[0]
        counts = {"classes": np.array([0, 1]), "count": np.array([3, 0])}
        faults = check(Payload({**payload.tensors, **counts}), two)
        assert "'mean': expected not to be there" in faults[0]
        shy = self.fed((0,), min_count_upload=4)
        assert "mean" not in shy.upload("train", 0).tensors
        assert shy.exchanges[0].check(replace(bare), shy.task) == []
