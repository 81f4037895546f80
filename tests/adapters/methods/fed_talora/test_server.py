"""Fed-TaLoRA's head and parts on the server, its composed model, options, whole federations."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.fed_talora_reference import features, head
from adapters.kit import DIM, Federation, client_id, make_tasks, toy_images
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Update
from fcil_adapters.contract.registry import make_hparams, schema_digest
from fcil_adapters.methods.fed_talora import METHOD
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload, pack
from tiers import sampled

TASKS = make_tasks([0, 1, 2], [5, 4])
ALL = (3, 4, 7, 2, 5, 9)
CLIENTS = [toy_images({0: 6, 1: 2}, 1), toy_images({0: 1, 5: 3}, 2), toy_images({1: 4, 4: 2}, 3)]
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_head": 0.1, "augment": "none"}


def federation(clients=CLIENTS, task=TASKS[0], **kw) -> Federation:
    fed = Federation.of("fed_talora", clients, **{**FAST, **kw})
    fed.open(task)
    return fed


def uploads(fed: Federation) -> UpdateList:
    return UpdateList.of(
        [Update(client_id(k), fed.upload("train", k)) for k in range(len(fed.clients))]
    )


def packed(fed: Federation) -> dict[str, bytes]:
    parts = fed.aggregator.broadcast(fed.context("train"), fed.state)
    return {p.name: pack(p.payload) for p in parts}


class TestOpening:
    @pytest.mark.parametrize(("init", "std"), [("uniform", 1 / np.sqrt(3)), ("gaussian", 1.0)])
    def test_draws_a_by_the_width_of_its_input_and_b_zero(self, init, std):
        fed = federation(rank=16, init_a=init)
        lora = {n: a for n, a in fed.state.tensors.items() if n.startswith("lora.")}
        for width, module in ((DIM, "q"), (4 * DIM, "fc2")):
            A = np.concatenate([lora[f"lora.{b}.{module}.A"] for b in (0, 1)])
            assert A.std() * np.sqrt(width) == pytest.approx(std, rel=0.1)
        assert not any(a.any() for n, a in lora.items() if n.endswith(".B"))

    def test_lora_goes_on_and_new_rows_are_small(self):
        fed = federation()
        fed.round()
        before = {n: a for n, a in fed.state.tensors.items() if n.startswith("lora.")}
        fed.open(TASKS[1])
        for name, array in before.items():
            np.testing.assert_array_equal(fed.state.tensors[name], array)
        assert np.abs(fed.state.tensors["task.1.head.weight"]).max() < 0.05
        assert not fed.state.tensors["task.1.head.bias"].any()

    def test_draws_depend_on_the_seed_alone(self):
        assert pack(federation().state) == pack(federation().state)
        assert pack(federation().state) != pack(federation(seed=1).state)

    def test_a_block_that_the_backbone_lacks_is_named(self):
        fed = Federation.of("fed_talora", CLIENTS)  # blocks 0 to 3 of a backbone with two
        with pytest.raises(ConfigError, match="block 2 does not exist"):
            _ = fed.exchanges


class TestHead:
    def rows(self, updates, name):
        return np.stack([u.payload.tensors[name].astype(np.float64) for u in updates])

    def test_rows_are_averaged_by_samples_and_stay_where_nobody_has_the_class(self):
        fed = federation()
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors
        n = np.array(updates.samples) / sum(updates.samples)
        for name in ("head.weight", "head.bias"):
            expected = np.tensordot(n, self.rows(updates, name), 1)
            np.testing.assert_allclose(after[f"task.0.{name}"][:2], expected[:2], atol=1e-6)
            before = fed.state.tensors[f"task.0.{name}"][2]
            np.testing.assert_array_equal(after[f"task.0.{name}"][2], before)
        assert after["task.0.seen"].tolist() == [1, 1, 0]

    def test_or_each_row_by_the_images_of_its_class(self):
        fed = federation(head_average="rows")
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors
        counts = self.rows(updates, "count")
        for row in (0, 1):
            share = counts[:, row] / counts[:, row].sum()
            expected = np.tensordot(share, self.rows(updates, "head.weight")[:, row], 1)
            np.testing.assert_allclose(after["task.0.head.weight"][row], expected, atol=1e-6)
        before = fed.state.tensors["task.0.head.weight"][2]
        np.testing.assert_array_equal(after["task.0.head.weight"][2], before)

    def test_uniform_weights(self):
        fed = federation(weights="uniform")
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors["task.0.head.weight"]
        expected = self.rows(updates, "head.weight").mean(0)
        np.testing.assert_allclose(after[:2], expected[:2], atol=1e-6)

    def test_all_rows_travel_together_with_the_loss_over_all(self):
        fed = federation(head_loss="all")
        fed.round()
        fed.open(TASKS[1])
        before = fed.parts()["current"].tensors
        assert before["classes"].tolist() == [0, 1, 2, 5, 4]
        updates = uploads(fed)
        fed.state = fed.aggregate("train", updates)
        after = fed.parts()["current"].tensors
        moved = (after["head.weight"] != before["head.weight"]).any(1).tolist()
        assert moved == [True, True, False, True, True]
        assert after["seen"].tolist() == [1, 1, 0, 1, 1]
        assert not any(n.startswith("task/") for n in fed.parts())

    def test_rows_of_past_classes_have_no_images_to_be_weighted_by(self):
        with pytest.raises(ConfigError, match="head_average = 'rows'"):
            federation(head_loss="all", head_average="rows")

    def test_one_client_is_the_identity(self):
        fed = federation(CLIENTS[:1])
        sent = fed.upload("train", 0)
        after = fed.aggregate("train", UpdateList.of([Update(client_id(0), sent)])).tensors
        for name, array in sent.tensors.items():
            if name.startswith("lora."):
                np.testing.assert_array_equal(after[name], array)
        np.testing.assert_array_equal(
            after["task.0.head.weight"][:2], sent.tensors["head.weight"][:2]
        )

    def test_the_numbering_of_clients_does_not_matter(self):
        fed = federation(lr_lora=0.1, epochs=3)
        sent = [u.payload for u in uploads(fed)]
        states = []
        for order in ((0, 1, 2), (2, 0, 1)):
            numbered = [Update(client_id(i), sent[j]) for i, j in enumerate(order)]
            states.append(fed.aggregate("train", UpdateList.of(numbered)))
        one, two = states
        assert one.meta == two.meta == {"task": 0, "version": 1, "base": 0}
        for name, array in one.tensors.items():
            if name.endswith(".L"):  # a pair may change its sign, its product does not
                other = f"{name[:-1]}R"
                products = [s.tensors[name] @ s.tensors[other] for s in states]
                np.testing.assert_allclose(*products, atol=1e-7)
            elif not name.endswith(".R"):
                np.testing.assert_allclose(two.tensors[name], array, atol=1e-6)


class TestLoneClass:
    def clients(self):
        return [toy_images({0: 6, 1: 2, 7: 3}, 1), toy_images({0: 2, 1: 3, 7: 5}, 2)]

    def test_at_first_its_row_is_the_federated_mean_of_length_one(self):
        fed = federation(self.clients(), make_tasks([7])[0])
        updates = uploads(fed)
        fed.state = fed.aggregate("train", updates)
        means = np.stack([u.payload.tensors["mean"][0] for u in updates]).astype(np.float64)
        mean = np.array([3, 5]) @ means / 8
        weight = fed.parts()["current"].tensors["head.weight"][0]
        np.testing.assert_allclose(weight, mean / np.linalg.norm(mean), atol=1e-6)
        assert fed.predictor().classes == (7,)

    def test_later_it_is_as_long_as_past_rows_and_the_lora_stays(self):
        tasks = make_tasks([0, 1], [7])
        fed = federation(self.clients(), tasks[0])
        fed.round()
        fed.open(tasks[1])
        before = dict(fed.state.tensors)
        fed.round()
        norms = np.linalg.norm(before["task.0.head.weight"], axis=1)
        row = fed.state.tensors["task.1.head.weight"][0]
        assert np.linalg.norm(row) == pytest.approx(norms.mean(), rel=1e-5)
        moved = [n for n, a in fed.state.tensors.items() if not np.array_equal(a, before[n])]
        assert sorted(moved) == ["task.1.head.weight", "task.1.seen"]

    def test_the_cap_holds_for_its_mean(self):
        clients = [toy_images({7: n}, n) for n in (8, 1, 2)]
        fed = federation(clients, make_tasks([7])[0], max_weight_share=0.4)
        updates = uploads(fed)
        fed.state = fed.aggregate("train", updates)
        means = np.stack([u.payload.tensors["mean"][0] for u in updates]).astype(np.float64)
        mean = np.array([0.4, 0.2, 0.4]) @ means
        weight = fed.parts()["current"].tensors["head.weight"][0]
        np.testing.assert_allclose(weight, mean / np.linalg.norm(mean), atol=1e-5)

    def test_means_that_all_stay_at_home_leave_it_unseen(self):
        fed = federation(self.clients(), make_tasks([7])[0], min_count_upload=9)
        before = fed.state.tensors["task.0.head.weight"]
        fed.round()
        np.testing.assert_array_equal(fed.state.tensors["task.0.head.weight"], before)
        assert fed.predictor().classes == ()

    def test_a_client_that_keeps_its_mean_has_no_part_in_the_row(self):
        fed = federation(self.clients(), make_tasks([7])[0], min_count_upload=4)
        updates = uploads(fed)
        fed.state = fed.aggregate("train", updates)
        mean = updates.updates[1].payload.tensors["mean"][0]
        weight = fed.parts()["current"].tensors["head.weight"][0]
        np.testing.assert_allclose(weight, mean / np.linalg.norm(mean), atol=1e-6)

    @pytest.mark.parametrize("loss", ["current", "seen_frozen", "all"])
    def test_a_run_of_lone_classes_learns_them_all(self, loss):
        clients = [toy_images({0: 8, 1: 8, 2: 8}, 1), toy_images({0: 4, 2: 6}, 2)]
        fed = Federation.of("fed_talora", clients, **FAST, head_loss=loss)
        for task in make_tasks([0], [1], [2]):
            fed.run(task, rounds=2)
        _, correct, total = evaluate(fed.predictor(), toy_images({0: 9, 1: 9, 2: 9}, 5))
        # without a past row to compete with, later rows of the other losses crowd out earlier
        assert correct.sum() / total.sum() > (0.6 if loss == "current" else 0.3)


class TestBroadcast:
    def test_finished_tasks_never_change_again(self):
        fed = federation(lr_lora=0.1, epochs=3)
        fed.round()
        fed.open(TASKS[1])
        before = packed(fed)
        fed.round()
        after = packed(fed)
        assert sorted(after) == ["current", "residual/1", "residual/2", "task/0"]
        assert [n for n in before if after[n] != before[n]] == ["current"]

    def test_frozen_factors_are_a_part_that_never_changes(self):
        fed = federation(freeze_a=True)
        before = packed(fed)
        fed.round()
        assert packed(fed)["fixed"] == before["fixed"]
        assert not any(n.endswith(".A") for n in fed.parts()["current"].tensors)

    def test_before_the_first_task_there_is_nothing_to_send(self):
        assert Federation.of("fed_talora", CLIENTS, **FAST).parts() == {}


class TestModel:
    @pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"residual": "dense"}], ids=str)
    def test_scores_are_the_heads_outputs_under_the_merged_weights(self, options):
        fed = federation(lr_lora=0.1, **options)
        fed.round()
        fed.open(TASKS[1])
        fed.round()
        parts = fed.parts()
        images = CLIENTS[0]
        f = features(fed.backbone, parts, images, scale=options.get("scale", 1.0))
        W, b, classes, seen = head(parts)
        predictor = fed.predictor()
        assert predictor.classes == (0, 1, 5, 4)  # nobody ever had class 2
        kept = [i for i, c in enumerate(classes) if seen[i]]
        expected = f @ W[kept].T + b[kept]
        np.testing.assert_allclose(predictor.logits(images.pictures), expected, atol=1e-3)
        fed.micro_batch = 3
        np.testing.assert_allclose(fed.predictor().logits(images.pictures), expected, atol=1e-3)
        assert fed.predictor().logits(images.pictures[:0]).shape == (0, 4)


class TestOptions:
    def test_the_paper_preset_is_the_papers_letter(self):
        h = make_hparams(METHOD, {"preset": "paper"})
        assert (h.weights, h.init_a, h.residual) == ("uniform", "gaussian", "factored")
        assert (h.blocks, h.modules, h.rank) == ((0, 1, 2, 3), ("q", "v", "fc1", "fc2"), 4)
        assert (h.lr_lora, h.lr_head, h.batch_size, h.epochs) == (1e-3, 1e-2, 64, 5)

    @pytest.mark.parametrize(
        ("option", "value"), [("blocks", [0, 0]), ("modules", ["q", "q"]), ("modules", ["k"])]
    )
    def test_wrong_placements_are_named(self, option, value):
        with pytest.raises(ConfigError, match=option):
            make_hparams(METHOD, {option: value})

    def test_options_that_change_payloads_change_the_digest(self):
        info = federation().backbone.info
        options = (
            {}, {"blocks": [1]}, {"modules": ["q"]}, {"freeze_a": True}, {"residual": "off"},
            {"head_loss": "all"},
        )  # fmt: skip
        digests = {
            schema_digest(METHOD, make_hparams(METHOD, {**FAST, **o}), info) for o in options
        }
        assert len(digests) == len(options)

    def test_uploads_carry_adapters_head_rows_and_counts(self):
        fed = federation()
        kinds = {t.kind for e in fed.exchanges for t in e.upload.tensors}
        assert kinds == {"lora", "head", "prototype", "count"}


VARIANTS = [
    {},
    {"residual": "dense"},
    {"residual": "off", "weights": "uniform", "init_a": "gaussian"},
    {"freeze_a": True, "schedule": "cosine"},
    {"modules": ["q", "v"], "catch_up": "factors", "weight_decay": 1e-4},
    {"augment": "crop_flip", "momentum": 0.0, "blocks": [1], "scale": 2.0},
]


@pytest.mark.parametrize("options", sampled(VARIANTS, lambda o: not o), ids=str)
def test_a_federation_of_three_tasks_learns_far_above_chance(options):
    """Two clients, one with half the images; guessing gives 17 % at the end."""
    clients = [toy_images(dict.fromkeys(ALL, 8), 1), toy_images(dict.fromkeys(ALL, 4), 2)]
    base = {**FAST, "epochs": 4, "batch_size": 8, "lr_lora": 1e-3, "lr_head": 0.01}
    fed = Federation.of("fed_talora", clients, **{**base, **options})
    for task in make_tasks([3, 4], [7, 2], [5, 9]):
        fed.run(task, rounds=2)
    test = toy_images(dict.fromkeys(ALL, 10), 5)
    _, correct, total = evaluate(fed.predictor(), test)
    assert correct.sum() / total.sum() > 0.35
    assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest


@pytest.mark.parametrize(
    "options",
    [{"head_loss": "seen_frozen"}, {"head_loss": "all"}, {"head_average": "rows"}],
    ids=str,
)
def test_what_forgets_by_design_still_tells_the_last_tasks_classes_apart(options):
    clients = [toy_images(dict.fromkeys((3, 4, 7, 2), 8), 1), toy_images({3: 12, 7: 6, 2: 6}, 2)]
    fed = Federation.of("fed_talora", clients, **{**FAST, "epochs": 5, **options})
    for task in make_tasks([3, 4], [7, 2]):
        fed.run(task, rounds=2)
    predictor, test = fed.predictor(), toy_images({7: 10, 2: 10}, 5)
    assert predictor.classes == (3, 4, 7, 2)
    right = np.where(predictor.logits(test.pictures)[:, 2:].argmax(1) == 0, 7, 2) == test.labels
    assert right.mean() > 0.7


def test_an_update_that_contradicts_its_schema_is_named():
    fed = federation()
    payload = fed.upload("train", 0)
    upload = fed.exchanges[0].upload
    short = {n: a for n, a in payload.tensors.items() if n != "lora.0.fc1.B"}
    assert "tensor 'lora.0.fc1.B' is missing" in upload.check(
        Payload(short, payload.meta), fed.dims
    )
    bad = {**payload.tensors, "head.bias": np.full(3, np.nan, np.float32)}
    assert any("NaN" in f for f in upload.check(Payload(bad, payload.meta), fed.dims))
