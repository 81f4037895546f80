"""PLoRA's composed model against merged weights, its options, and whole small federations."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.plora_reference import RANK, features_and_tap, hand_made
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Context
from fcil_adapters.contract.registry import make_hparams, schema_digest
from fcil_adapters.methods.plora import METHOD
from fcil_adapters.methods.plora.model import Model
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import pack, unpack
from tiers import sampled

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
ALL = (3, 4, 7, 2, 5, 9)
IMAGES = toy_images({3: 3, 7: 2, 9: 4}, seed=4)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def compose(backbone, broadcast, micro_batch=None, **kw):
    h = make_hparams(METHOD, {"rank": RANK, "blocks": [0], **kw})
    ctx = Context("evaluate", TASKS[-1], 0, 1, h, backbone.info, micro_batch=micro_batch)
    return Model().compose(ctx, broadcast, backbone)


class TestCompose:
    @pytest.mark.parametrize("count", [1, 3])
    def test_scores_are_squared_distances_under_the_merged_weights(self, backbone, count):
        broadcast = hand_made(TASKS[:count], blocks=(0, 1))
        predictor = compose(backbone, broadcast, blocks=[0, 1], scale=0.7)
        f, _ = features_and_tap(
            backbone, broadcast[f"lora/{count - 1}"].tensors, IMAGES, blocks=(0, 1), scale=0.7
        )
        ordered = [broadcast[f"task/{t}"] for t in range(count)]
        m = np.concatenate([p.tensors["proto"] for p in ordered]).astype(np.float64)
        expected = -np.square(f[:, None, :] - m[None]).sum(2)
        np.testing.assert_allclose(
            predictor.logits(IMAGES.pictures), expected, rtol=1e-4, atol=1e-3
        )
        assert predictor.classes == ALL[: 2 * count]

    def test_classes_that_nobody_ever_had_are_no_candidates(self, backbone):
        assert compose(backbone, hand_made(TASKS, unseen=(4, 9))).classes == (3, 7, 2, 5)
        empty = compose(backbone, hand_made(TASKS[:1], unseen=(3, 4)))
        assert empty.logits(IMAGES.pictures).shape == (9, 0)

    def test_micro_batches_give_the_same_scores(self, backbone):
        whole = compose(backbone, hand_made(TASKS)).logits(IMAGES.pictures)
        split = compose(backbone, hand_made(TASKS), micro_batch=2).logits(IMAGES.pictures)
        np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-4)

    def test_a_late_client_gets_identical_scores_from_the_parts(self, backbone):
        received = {name: unpack(pack(p)) for name, p in hand_made(TASKS).items()}
        one, other = compose(backbone, hand_made(TASKS)), compose(backbone, received)
        np.testing.assert_array_equal(one.logits(IMAGES.pictures), other.logits(IMAGES.pictures))
        assert backbone_digest(backbone.module.state_dict()) == backbone.info.digest


class TestOptions:
    def test_the_paper_preset_is_the_papers_letter(self):
        h = make_hparams(METHOD, {"preset": "paper"})
        assert (h.dce, h.delta, h.lambda_pl) == ("sq", 1, 0.001)
        assert (h.gamma_kd, h.kd_reduction, h.init) == (5, "sum_d", "random")
        assert (h.rank, h.blocks, h.epochs, h.batch_size) == (4, (0, 1, 2, 3, 4), 5, 64)
        assert (h.lr_prototype, h.lr_lora, h.weight_decay, h.schedule) == (2e-3, 1e-5, 0, "cosine")
        w = h.reweight
        assert (w.temperature, w.eta, w.distance, w.empty) == ("mul", 0.2, "squared", "uniform")

    @pytest.mark.parametrize("blocks", [[0, 0], [-1], []])
    def test_blocks_must_be_different_numbers(self, blocks):
        with pytest.raises(ConfigError, match="blocks"):
            make_hparams(METHOD, {"blocks": blocks})

    def test_options_that_change_payloads_change_the_digest(self, backbone):
        options = ({"blocks": [0]}, {"blocks": [1]}, {"blocks": [0], "gamma_kd": 0.0})
        digests = {schema_digest(METHOD, make_hparams(METHOD, o), backbone.info) for o in options}
        assert len(digests) == 3

    def test_uploads_carry_no_tensor_beyond_adapters_prototypes_and_counts(self, backbone):
        h = make_hparams(METHOD, {"blocks": [0]})
        kinds = {t.kind for e in METHOD.exchanges(h, backbone.info) for t in e.upload.tensors}
        assert kinds == {"lora", "prototype", "count"}


VARIANTS = [
    {},
    {"init": "random", "lr_prototype": 0.1, "epochs": 8, "lambda_pl": 1.0},
    {"gamma_kd": 0.0, "lr_lora": 1e-4, "schedule": "constant"},
    {"kd_reduction": "mean_d", "gamma_kd": 80.0, "dce": "sq_over_d", "weight_decay": 1e-5},
    {"mean_from": "training", "reweight": {"enabled": False}, "min_count_upload": 2},
    {"blocks": [0], "augment": "none", "dce": "sq", "lr_lora": 1e-4},
]


@pytest.mark.parametrize("options", sampled(VARIANTS, lambda o: not o), ids=str)
def test_a_federation_of_three_tasks_learns_all_classes(options):
    """Two clients, one of which lacks classes; far above the 17 % of guessing at the end."""
    clients = [toy_images(dict.fromkeys(ALL, 8), 1), toy_images({3: 12, 7: 6, 9: 8}, 2)]
    base = {
        "rank": RANK, "blocks": [0, 1], "epochs": 2, "lr_prototype": 2e-2, "lr_lora": 1e-3,
        "augment": "jitter",
    }  # fmt: skip
    fed = Federation.of("plora", clients, **{**base, **options})
    for task in TASKS:
        fed.run(task, rounds=1)
    test = toy_images(dict.fromkeys(ALL, 10), 5)
    _, correct, total = evaluate(fed.predictor(), test)
    assert correct.sum() / total.sum() > 0.6
    assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest


@pytest.mark.parametrize("init", ["class_means", "random"])
def test_a_run_of_lone_classes_learns_them_all(init):
    """The very first has no other column; the later ones have the past prototypes."""
    clients = [toy_images({0: 8, 1: 8, 2: 8}, 1), toy_images({0: 4, 2: 6}, 2)]
    fed = Federation.of(
        "plora", clients, rank=RANK, blocks=[0, 1], epochs=10, lr_prototype=0.1, lr_lora=1e-3,
        lambda_pl=1.0, augment="none", init=init,
    )  # fmt: skip
    for task in make_tasks([0], [1], [2]):
        fed.run(task, rounds=2)
    _, correct, total = evaluate(fed.predictor(), toy_images({0: 9, 1: 9, 2: 9}, 5))
    assert correct.sum() / total.sum() > 0.8


def test_tasks_of_one_class_with_one_image_each_work():
    images = [toy_images({c: 1}, c) for c in (0, 1)]
    fed = Federation.of("plora", images, rank=RANK, blocks=[0], epochs=1)
    for task in make_tasks([0], [1]):
        fed.run(task)
    predictor = fed.predictor()
    assert predictor.classes == (0, 1)
    assert evaluate(predictor, images[1])[1].sum() == 1
