"""PILoRA's composed model against merged weights, its options, and whole small federations."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.pilora_reference import RANK, hand_made, hand_made_part, inference_features
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Context
from fcil_adapters.contract.registry import make_hparams, schema_digest
from fcil_adapters.methods.pilora import METHOD
from fcil_adapters.methods.pilora.model import Model
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import pack, unpack
from tiers import sampled

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
IMAGES = toy_images({3: 3, 7: 2, 9: 4}, seed=4)
COMPOSE = ["sum_of_products", "product_of_sums", "task0_plus_current", "task0_only"]


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def parts(count: int = 3, blocks=(0,), unseen=()):
    made = [
        hand_made_part(t, TASKS[t].classes, seed=t, blocks=blocks, unseen=unseen)
        for t in range(count)
    ]
    return hand_made(made)


def compose(backbone, broadcast, micro_batch=None, **kw):
    h = make_hparams(METHOD, {"rank": RANK, **kw})
    ctx = Context("evaluate", TASKS[-1], 0, 1, h, backbone.info, micro_batch=micro_batch)
    return Model().compose(ctx, broadcast, backbone)


class TestCompose:
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("name", COMPOSE)
    def test_scores_are_squared_distances_under_the_merged_weights(self, backbone, name, count):
        broadcast = parts(count, blocks=(0, 1))
        predictor = compose(backbone, broadcast, compose=name, blocks=(0, 1), scale=0.7)
        ordered = [broadcast[f"task/{t}"] for t in range(count)]
        f = inference_features(
            backbone, ordered, IMAGES, compose=name, blocks=(0, 1), scale=0.7
        ).numpy()
        m = np.concatenate([p.tensors["proto"] for p in ordered]).astype(np.float64)
        expected = -np.square(f[:, None, :] - m[None]).sum(2)
        np.testing.assert_allclose(
            predictor.logits(IMAGES.pictures), expected, rtol=1e-4, atol=1e-3
        )
        assert predictor.classes == tuple(c for t in TASKS[:count] for c in t.classes)

    def test_the_four_compositions_differ_from_the_third_task_on(self, backbone):
        scores = [
            compose(backbone, parts(), compose=name).logits(IMAGES.pictures) for name in COMPOSE
        ]
        for i in range(4):
            for j in range(i):
                assert np.abs(scores[i] - scores[j]).max() > 0.1

    def test_classes_that_nobody_ever_had_are_no_candidates(self, backbone):
        predictor = compose(backbone, parts(unseen=(4, 9)))
        assert predictor.classes == (3, 7, 2, 5)
        assert predictor.logits(IMAGES.pictures).shape == (9, 4)

    def test_without_any_seen_class_there_are_no_columns(self, backbone):
        predictor = compose(backbone, parts(1, unseen=(3, 4)))
        assert predictor.classes == ()
        assert predictor.logits(IMAGES.pictures).shape == (9, 0)
        assert evaluate(predictor, IMAGES)[1].sum() == 0

    def test_micro_batches_give_the_same_scores(self, backbone):
        whole = compose(backbone, parts()).logits(IMAGES.pictures)
        split = compose(backbone, parts(), micro_batch=2).logits(IMAGES.pictures)
        np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-4)

    def test_no_images_give_no_rows(self, backbone):
        assert compose(backbone, parts()).logits(IMAGES.pictures[:0]).shape == (0, 6)

    def test_the_backbone_stays_bit_equal(self, backbone):
        compose(backbone, parts()).logits(IMAGES.pictures)
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest

    def test_parts_that_went_through_bytes_give_identical_scores(self, backbone):
        """A client that joins late has nothing but the parts."""
        received = {name: unpack(pack(p)) for name, p in parts().items()}
        one, other = compose(backbone, parts()), compose(backbone, received)
        np.testing.assert_array_equal(one.logits(IMAGES.pictures), other.logits(IMAGES.pictures))


class TestOptions:
    def test_the_paper_preset_is_the_papers_letter(self):
        h = make_hparams(METHOD, {"preset": "paper"})
        assert (h.dce, h.delta, h.lambda_pl, h.gamma_ort, h.l1) == ("sq", 1, 0.001, 0.5, 0)
        assert (h.compose, h.train_with) == ("product_of_sums", "current_only")
        assert (h.init, h.init_a, h.candidates) == ("random", "gaussian", "seen")
        assert (h.rank, h.blocks, h.scale, h.epochs, h.batch_size) == (4, (0,), 1, 5, 64)
        assert (h.lr_prototype, h.lr_lora, h.weight_decay, h.schedule) == (2e-3, 1e-5, 0, "cosine")
        w = h.reweight
        assert (w.temperature, w.eta, w.distance, w.empty) == ("mul", 0.2, "squared", "uniform")
        assert (w.owners_only, w.count_weighted, w.min_count) == (False, False, 1)

    def test_the_repo_preset_is_what_the_published_code_does(self):
        h = make_hparams(METHOD, {"preset": "repo"})
        assert (h.dce, h.l1, h.weight_decay, h.schedule) == ("rms", 0.01, 1e-5, "cosine_repeat")
        assert (h.compose, h.train_with) == ("task0_only", "current_only")
        assert (h.init, h.init_a, h.mean_from, h.epochs) == ("random", "uniform", "training", 10)
        w = h.reweight
        assert (w.temperature, w.eta, w.distance, w.empty) == ("div", 0.2, "plain", "uniform")

    def test_candidates_all_needs_the_number_of_classes(self):
        with pytest.raises(ConfigError, match="needs total_classes"):
            make_hparams(METHOD, {"candidates": "all"})

    @pytest.mark.parametrize("blocks", [[0, 0], [-1], []])
    def test_blocks_must_be_different_numbers(self, blocks):
        with pytest.raises(ConfigError, match="blocks"):
            make_hparams(METHOD, {"blocks": blocks})

    def test_a_block_that_the_backbone_lacks_is_named(self, backbone):
        h = make_hparams(METHOD, {"blocks": [0, 2]})
        with pytest.raises(ConfigError, match="block 2 does not exist"):
            METHOD.exchanges(h, backbone.info)
        with pytest.raises(ConfigError, match="blocks 0 to 1"):
            METHOD.broadcast(h, backbone.info)

    def test_options_that_change_payloads_change_the_digest(self, backbone):
        digests = {
            schema_digest(METHOD, make_hparams(METHOD, o), backbone.info)
            for o in (
                {},
                {"blocks": [1]},
                {"init": "random"},
                {"candidates": "all", "total_classes": 9},
            )
        }
        assert len(digests) == 4


def test_uploads_carry_no_tensor_beyond_adapters_prototypes_and_counts(backbone):
    h = make_hparams(METHOD, {})
    kinds = {t.kind for e in METHOD.exchanges(h, backbone.info) for t in e.upload.tensors}
    assert kinds == {"lora", "prototype", "count"}


VARIANTS = [
    {},
    {"init": "random", "lr_prototype": 0.1, "epochs": 10, "lambda_pl": 1.0},
    {"compose": "product_of_sums"},
    {"compose": "task0_plus_current"},
    {"compose": "task0_only", "train_with": "current_only", "lr_lora": 1e-4},
    {"candidates": "all", "total_classes": 8, "dce": "sq_over_d"},
    {"mean_from": "training", "schedule": "cosine_repeat", "weight_decay": 1e-5, "l1": 0.01},
    {"reweight": {"enabled": False}},
    {"blocks": [0, 1], "augment": "none", "dce": "sq", "lr_lora": 1e-4},
]


@pytest.mark.parametrize("options", sampled(VARIANTS, lambda o: not o or "blocks" in o), ids=str)
def test_a_federation_of_three_tasks_learns_all_classes(options):
    """Two clients, one of which lacks classes; far above the 17 % of guessing at the end."""
    clients = [
        toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 8), 1),
        toy_images({3: 12, 7: 6, 9: 8}, 2),
    ]
    base = {"rank": RANK, "epochs": 3, "lr_prototype": 2e-2, "lr_lora": 1e-3, "augment": "jitter"}
    fed = Federation.of("pilora", clients, **{**base, **options})
    for task in TASKS:
        fed.run(task, rounds=2)
    test = toy_images(dict.fromkeys((3, 4, 7, 2, 5, 9), 10), 5)
    _, correct, total = evaluate(fed.predictor(), test)
    assert correct.sum() / total.sum() > 0.6
    assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest


def test_re_weighting_helps_when_every_client_holds_one_class():
    """The sole owner's prototype wins; a plain average keeps half of the strangers' drift."""

    def error(enabled: bool) -> float:
        clients = [toy_images({c: 10}, c) for c in (0, 1)]
        fed = Federation.of(
            "pilora", clients, rank=RANK, epochs=10, lr_prototype=0.1, lr_lora=0.0,
            init="random", augment="none", reweight={"enabled": enabled},
        )  # fmt: skip
        fed.open(make_tasks([0, 1])[0])
        fed.round("train")
        proto = fed.parts()["task/0"].tensors["proto"]
        means = [fed.upload("train", k).tensors["mean"][0] for k in (0, 1)]
        return float(np.linalg.norm(proto - np.stack(means)))

    assert error(True) < 0.9 * error(False)


@pytest.mark.parametrize("init", ["class_means", "random"])
def test_a_run_of_lone_classes_learns_them_all(init):
    """The very first has no other column; the later ones have the past prototypes."""
    clients = [toy_images({0: 8, 1: 8, 2: 8}, 1), toy_images({0: 4, 2: 6}, 2)]
    fed = Federation.of(
        "pilora", clients, rank=RANK, epochs=10, lr_prototype=0.1, lr_lora=1e-3,
        lambda_pl=1.0, augment="none", init=init,
    )  # fmt: skip
    for task in make_tasks([0], [1], [2]):
        fed.run(task, rounds=2)
    _, correct, total = evaluate(fed.predictor(), toy_images({0: 9, 1: 9, 2: 9}, 5))
    assert correct.sum() / total.sum() > 0.8


def test_a_federation_with_one_image_per_class_works():
    fed = Federation.of("pilora", [toy_images({0: 1}), toy_images({1: 1})], rank=RANK, epochs=1)
    fed.run(make_tasks([0, 1])[0])
    predictor = fed.predictor()
    assert predictor.classes == (0, 1)
    assert predictor.logits(fed.clients[0].pictures).shape == (1, 2)
