"""HGP's aggregation, its composed model and its options, in whole small federations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapters.discriminant_reference import from_first, log_posteriors
from adapters.hgp_reference import BLOCKS, SMALL, hand_made, logits, prompted_features
from adapters.kit import DIM, Federation, client_id, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Context, Update
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.hgp import METHOD
from fcil_adapters.methods.hgp.model import Model
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.store import read_entries
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.payloads.payload import pack, unpack
from tiers import sampled

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
FAST = {
    **SMALL, "epochs": 1, "batch_size": 16, "lr_prompt": 1e-2, "lr_head": 5e-2, "cov_rank": 2,
    "augment": "none", "samples_per_class": 16, "server_epochs": 2, "server_batch": 16,
}  # fmt: skip
CLIENTS = [toy_images({3: 6, 4: 2, 7: 3}, 1), toy_images({3: 1, 2: 3}, 2), toy_images({4: 4}, 3)]


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(clients=CLIENTS, task=TASKS[0], **kw) -> Federation:
    fed = Federation.of("hgp", clients, **{**FAST, **kw})
    fed.open(task)
    return fed


def uploads(fed: Federation) -> UpdateList:
    return UpdateList.of(
        [Update(client_id(k), fed.upload("train", k)) for k in range(len(fed.clients))]
    )


def described(fed: Federation):
    return {(e.label, e.client[0]): e.gaussian for e in read_entries(fed.state, [fed.task.index])}


class TestOpening:
    def test_draws_orthonormal_prompts_and_keys_and_small_head_rows(self):
        fed = federation()
        fed.open(TASKS[1])
        for b in BLOCKS:
            keys = [fed.state.f32(f"task.{t}.key.{b}") for t in (0, 1)]
            both = np.concatenate(keys)
            np.testing.assert_allclose(both @ both.T, np.eye(len(both)), atol=1e-6)
            prompts = [fed.state.f32(f"task.{t}.prompt.{b}").reshape(3, -1) for t in (0, 1)]
            assert np.abs(prompts[0] @ prompts[1].T).max() < 1e-6
        assert fed.state.f32("head.weight").shape == (4, DIM)
        assert fed.state.i64("classes").tolist() == [3, 4, 7, 2]

    def test_depends_on_seed_and_task_alone(self):
        one, same, other = federation(), federation(), federation(seed=1)
        assert pack(one.state) == pack(same.state)
        assert pack(one.state) != pack(other.state)

    def test_tasks_cannot_open_out_of_order(self):
        with pytest.raises(AssertionError, match="one after the other"):
            federation(task=TASKS[1])


class TestAggregate:
    def test_prompts_keys_and_rows_are_sample_weighted_means(self):
        fed = federation(rebalance="off")
        updates = uploads(fed)
        after = fed.aggregate("train", updates)
        w = np.array(updates.samples, dtype=np.float64)
        for b in BLOCKS:
            for name in (f"key.{b}", f"prompt.{b}"):
                stack = np.stack([u.payload.f32(name) for u in updates]).astype(np.float64)
                np.testing.assert_allclose(
                    after.f32(f"task.0.{name}"), np.tensordot(w / w.sum(), stack, 1), atol=1e-6
                )
        stack = np.stack([u.payload.f32("head.weight") for u in updates]).astype(np.float64)
        np.testing.assert_allclose(
            after.f32("head.weight"), np.tensordot(w / w.sum(), stack, 1), atol=1e-6
        )

    def test_the_weight_cap_holds(self):
        fed = federation(rebalance="off", max_weight_share=0.4)
        updates = uploads(fed)  # 8, 1 and 4 images: 0.62 is capped, the rest shared 1 to 4
        after = fed.aggregate("train", updates).f32("task.0.key.0")
        stack = np.stack([u.payload.f32("key.0") for u in updates])
        np.testing.assert_allclose(after, np.tensordot([0.4, 0.2, 0.4], stack, 1), atol=1e-6)

    def test_rebalancing_changes_the_rows_and_only_them(self):
        fed = federation()
        updates = uploads(fed)
        on = fed.aggregate("train", updates)
        plain = replace(fed, hparams=make_hparams(METHOD, {**FAST, "rebalance": "off"}))
        plain.task, plain.state = fed.task, fed.state
        off = plain.aggregate("train", updates)
        changed = {n for n in on.tensors if not np.array_equal(on.tensors[n], off.tensors[n])}
        assert changed == {"head.weight", "head.bias"}

    @pytest.mark.parametrize(
        ("options", "scale"), [({}, 3), ({"cov": "diag"}, 1), ({"cov_scale": 2.5}, 2.5)]
    )
    def test_samples_are_as_many_and_as_wide_as_the_options_say(self, options, scale, monkeypatch):
        asked = []
        original = Mixture.draw

        def draw(mixture, total, s, *rest):
            asked.append((total, s))
            return original(mixture, total, s, *rest)

        monkeypatch.setattr(Mixture, "draw", draw)
        fed = federation(**options)
        fed.round()
        fed.open(TASKS[1])
        fed.round()
        assert asked == [(16 * 2, scale)] * 2 + [(16 * 4, scale)] * 2

    @pytest.mark.parametrize(("mode", "past_moves"), [("seen", True), ("current", False)])
    def test_past_rows_move_only_when_all_seen_classes_are_sampled(self, mode, past_moves):
        fed = federation(rebalance=mode)
        fed.round()
        before = fed.state.f32("head.weight")
        fed.open(TASKS[1])
        fed.round()
        after = fed.state.f32("head.weight")[:2]
        assert (np.abs(after - before).max() > 1e-6) == past_moves

    def test_neither_order_nor_a_second_run_changes_a_byte(self):
        fed = federation()
        updates = uploads(fed)
        mixed = UpdateList.of([updates.updates[i] for i in (2, 0, 1)])
        states = [fed.aggregate("train", u) for u in (updates, updates, mixed)]
        assert len({pack(s) for s in states}) == 1

    def test_one_client_is_local_training(self):
        fed = federation(CLIENTS[:1], rebalance="off")
        sent = fed.upload("train", 0)
        fed.round()
        np.testing.assert_array_equal(fed.state.f32("head.weight"), sent.f32("head.weight"))
        np.testing.assert_array_equal(fed.state.f32("task.0.prompt.1"), sent.f32("prompt.1"))


class TestStaleAndMissing:
    def test_absent_clients_keep_their_entries_of_the_task(self):
        fed = federation()
        fed.round()
        first = described(fed)
        fed.clients = CLIENTS[:1]
        fed.round(round_=1)
        then = described(fed)
        assert set(then) == {(3, "a"), (3, "b"), (4, "a"), (4, "c")}
        np.testing.assert_array_equal(then[4, "c"].mean, first[4, "c"].mean)
        assert np.abs(then[3, "a"].mean - first[3, "a"].mean).max() > 0

    def test_unless_stale_ones_are_dropped(self):
        fed = federation(drop_stale=True)
        fed.round()
        fed.clients = CLIENTS[:1]
        fed.round(round_=1)
        assert set(described(fed)) == {(3, "a"), (4, "a")}

    def test_a_class_that_nobody_ever_had_keeps_its_row_and_is_no_candidate(self):
        fed = federation([toy_images({3: 4}), toy_images({3: 3}, 1)])
        fed.round()
        fed.open(TASKS[1])
        fed.clients = [toy_images({7: 4, 2: 2})]
        before = fed.state.f32("head.weight")[1]
        fed.round()
        np.testing.assert_array_equal(fed.state.f32("head.weight")[1], before)
        assert fed.predictor().classes == (3, 7, 2)

    def test_a_class_that_nobody_has_this_round_stays_seen_and_sampled(self):
        fed = federation()
        fed.round()
        fed.clients = [toy_images({3: 4})]
        fed.round(round_=1)
        assert (4, "c") in described(fed)
        assert fed.predictor().classes == (3, 4)

    def test_classes_whose_gaussians_stay_at_home_are_candidates_without_samples(self):
        fed = federation([toy_images({3: 6, 4: 2})], min_count_upload=3)
        sent = fed.upload("train", 0)
        fed.round()
        assert set(described(fed)) == {(3, "a")}
        assert fed.predictor().classes == (3, 4)
        np.testing.assert_array_equal(fed.state.f32("head.weight"), sent.f32("head.weight"))

    def test_single_images_are_sampled_with_a_borrowed_covariance(self):
        fed = federation([toy_images({3: 1, 4: 1}), toy_images({3: 1}, 1)])
        fed.round()
        assert all(np.isfinite(a).all() for a in fed.state.tensors.values())
        assert fed.predictor().classes == (3, 4)


class TestTasksOfOneClass:
    def test_the_first_takes_the_federated_mean_at_length_one(self):
        fed = federation([toy_images({6: 5}), toy_images({6: 2}, 1)], make_tasks([6])[0])
        updates = uploads(fed)
        fed.state = fed.aggregate("train", updates)
        means = [u.payload.f32("gauss.mean")[0].astype(np.float64) for u in updates]
        mean = (5 * means[0] + 2 * means[1]) / 7
        row = fed.state.f32("head.weight")[0]
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-6)
        assert fed.predictor().classes == (6,)

    def test_a_later_one_is_as_long_as_the_known_rows_before(self):
        tasks = make_tasks([3, 4], [7])
        fed = federation(task=tasks[0], rebalance="off")
        fed.round()
        past = fed.state.f32("head.weight")
        fed.open(tasks[1])
        fed.round()
        weight = fed.state.f32("head.weight")
        np.testing.assert_array_equal(weight[:2], past)
        expected = np.linalg.norm(past, axis=1).mean()
        assert np.linalg.norm(weight[2]) == pytest.approx(expected, rel=1e-5)
        assert fed.state.f32("head.bias")[2] == 0

    def test_a_lone_class_without_any_gaussian_is_no_candidate(self):
        fed = Federation.of("hgp", [toy_images({3: 6, 4: 6, 7: 1})], **FAST, min_count_upload=2)
        first, second = make_tasks([3, 4], [7])
        fed.run(first)
        fed.run(second)
        assert fed.predictor().classes == (3, 4)

    def test_a_run_of_single_classes_learns_them_all(self):
        classes = (3, 4, 7, 2)
        fed = Federation.of(
            "hgp", [toy_images(dict.fromkeys(classes, 8), 1), toy_images({3: 5, 2: 5}, 2)],
            **{**FAST, "samples_per_class": 64, "server_epochs": 5},
        )  # fmt: skip
        for task in make_tasks(*[[c] for c in classes]):
            fed.run(task)
        _, correct, total = evaluate(fed.predictor(), toy_images(dict.fromkeys(classes, 10), 5))
        assert correct.sum() / total.sum() > 0.7


class TestBroadcast:
    def test_finished_tasks_keep_their_bytes_and_gaussians_stay_home(self):
        fed = federation()
        fed.round()
        ended = fed.parts()
        fed.open(TASKS[1])
        opened = fed.parts()
        fed.round()
        done = fed.parts()
        assert sorted(done) == ["current", "task/0", "task/1"]
        assert pack(ended["task/0"]) == pack(opened["task/0"]) == pack(done["task/0"])
        for name in ("current", "task/1"):
            assert pack(opened[name]) != pack(done[name])
        assert not [n for p in done.values() for n in p.tensors if n.startswith("gauss")]

    def test_a_late_joiner_composes_the_same_predictor(self):
        fed = federation()
        fed.round()
        fed.open(TASKS[1])
        fed.round()
        images = toy_images({3: 2, 2: 2}).pictures
        ctx = fed.context("evaluate")
        late = {name: unpack(pack(p)) for name, p in fed.parts().items()}
        other = Model().compose(ctx, late, toy_backbone())
        np.testing.assert_array_equal(fed.predictor().logits(images), other.logits(images))


class TestCompose:
    IMAGES = toy_images({3: 2, 7: 1, 9: 2}, seed=4)

    def compose(self, backbone, parts, micro_batch=None, **kw):
        h = make_hparams(METHOD, {**SMALL, **kw})
        ctx = Context("evaluate", TASKS[-1], 0, 1, h, backbone.info, micro_batch=micro_batch)
        return Model().compose(ctx, parts, backbone)

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("score", ["cosine", "softmax"])
    @pytest.mark.parametrize("sharing", ["per_layer", "shared"])
    def test_scores_are_the_heads_over_features_prompted_by_all_tasks(
        self, backbone, count, score, sharing
    ):
        shared, unit = sharing == "shared", score == "softmax"
        parts = hand_made(TASKS[:count], unseen=(4,), pools=("shared",) if shared else ("0", "1"))
        pixels = "unit" if unit else "normalised"
        predictor = self.compose(backbone, parts, score=score, pool_sharing=sharing, pixels=pixels)
        f = prompted_features(backbone, parts, self.IMAGES, score=score, shared=shared, unit=unit)
        head = parts["current"].tensors
        kept = head["seen"] > 0
        expected = logits(f, head["head.weight"][kept], head["head.bias"][kept])
        np.testing.assert_allclose(predictor.logits(self.IMAGES.pictures), expected, atol=2e-4)
        assert predictor.classes == (3, 7, 2, 5, 9)[: 2 * count - 1]

    def test_micro_batches_no_images_and_no_classes(self, backbone):
        parts = hand_made(TASKS)
        whole = self.compose(backbone, parts).logits(self.IMAGES.pictures)
        split = self.compose(backbone, parts, micro_batch=2).logits(self.IMAGES.pictures)
        np.testing.assert_allclose(split, whole, atol=1e-4)
        assert self.compose(backbone, parts).logits(self.IMAGES.pictures[:0]).shape == (0, 6)
        nobody = self.compose(backbone, hand_made(TASKS[:1], unseen=(3, 4)))
        assert nobody.logits(self.IMAGES.pictures).shape == (5, 0)
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest


VARIANTS = [
    {},
    {**METHOD.presets["paper"], "pixels": "normalised"},
    {**METHOD.presets["repo"], "query": "canonical"},
    {"cov": "diag", "class_weights": "uniform", "pixels": "unit"},
    {"pool_sharing": "shared", "score": "softmax", "schedule": "constant", "cov_scale": 2.0},
    {"drop_stale": True, "min_count_upload": 2, "augment": "jitter"},
]


@pytest.mark.parametrize(
    "options", sampled(VARIANTS, lambda o: not o or o.get("cov") == "full"), ids=str
)
def test_a_federation_of_three_tasks_learns_all_classes(options):
    """Two clients, one of which lacks classes; far above the 17 % of guessing at the end."""
    clients = [
        toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 8), 1),
        toy_images({3: 12, 7: 6, 9: 8}, 2),
    ]
    base = {**FAST, "epochs": 2, "samples_per_class": 64, "server_epochs": 5}
    fed = Federation.of("hgp", clients, **{**base, **options})
    for task in TASKS:
        fed.run(task, rounds=2)
    test = toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 10), 5)
    _, correct, total = evaluate(fed.predictor(), test)
    assert correct.sum() / total.sum() > 0.6
    assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest


def test_rebalancing_all_seen_classes_is_what_keeps_old_ones():
    """The paper's ablation in small: without it, the newest task takes the answers."""

    def accuracy(mode: str) -> float:
        fed = Federation.of(
            "hgp", [toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 8), 1)],
            **{**FAST, "epochs": 4, "samples_per_class": 64, "server_epochs": 5, "rebalance": mode},
        )  # fmt: skip
        for task in TASKS:
            fed.run(task)
        test = toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 10), 5)
        _, correct, total = evaluate(fed.predictor(), test)
        return float(correct.sum() / total.sum())

    assert accuracy("seen") > accuracy("off")


class TestQuadraticHead:
    def test_scores_are_log_posteriors_of_the_sent_gaussians(self, backbone):
        clients = [toy_images({3: 9, 4: 4, 7: 8}, 1), toy_images({3: 4, 4: 9, 2: 3}, 2)]
        options = {"head": "quadratic", "own_rank": 2, "own_share": 0.3, "cov": "full"}
        fed = Federation.of("hgp", clients, backbone, **{**FAST, **options})
        fed.run(TASKS[0])
        fed.run(TASKS[1])
        test = toy_images({3: 3, 4: 3, 7: 3, 2: 3}, 9)
        x = prompted_features(backbone, fed.parts(), test)
        entries = read_entries(fed.state, [0, 1])
        wanted = log_posteriors(
            make_mixture(entries, (3, 4, 7, 2), "counts"), x, 2, (0.3, 1.0, 0.3)
        )
        predictor = fed.predictor()
        assert predictor.classes == (3, 4, 7, 2)
        got = from_first(predictor.logits(test.pictures))
        np.testing.assert_allclose(got, from_first(wanted), rtol=1e-3, atol=1e-3)

    def test_trained_rows_are_averaged_and_not_rebalanced(self):
        fed = federation(head="quadratic")
        updates = uploads(fed)
        after = fed.aggregate("train", updates)
        plain = replace(fed, hparams=make_hparams(METHOD, {**FAST, "rebalance": "off"}))
        plain.task, plain.state = fed.task, fed.state
        off = plain.aggregate("train", updates)
        new = {n for n in after.tensors if n not in off.tensors}
        assert new == {f"discriminant.{n}" for n in ("weight", "bias", "classes", "turn", "offset")}
        assert all(np.array_equal(a, after.tensors[n]) for n, a in off.tensors.items())

    def test_a_class_whose_gaussians_stay_at_home_is_no_candidate(self, backbone):
        clients = [toy_images({3: 6, 4: 2}, 1)]
        options = {"head": "quadratic", "min_count_upload": 3}
        fed = Federation.of("hgp", clients, backbone, **{**FAST, **options})
        fed.open(TASKS[0])
        assert fed.predictor().classes == ()
        fed.round("train")
        assert fed.predictor().classes == (3,)
