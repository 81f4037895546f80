"""LoRM: turns of the factors, what clients say of their layers' inputs, merges of rounds and tasks."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from adapters.kit import DIM, Federation, client_id, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import cls_features
from fcil_adapters.contract import Update
from fcil_adapters.methods.lorm.aggregator import capped_pulls
from fcil_adapters.methods.lorm.inputs import merged_tasks_view
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.methods.lorm.parts import read_tasks
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.lora.client import LoraSetup
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.payload import Payload, pack

FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "batch_size": 4, "lr_lora": 0.05, "lr_head": 0.1,
        "augment": "none"}  # fmt: skip
TASKS = make_tasks([3, 1], [5, 4], [2], [0, 6])
THIRD = make_tasks([3, 1], [5, 4], [0, 6])[2]
CLIENTS = [toy_images({3: 4, 1: 2, 5: 3, 4: 3, 2: 2, 0: 2, 6: 2}, 1),
           toy_images({1: 3, 5: 1, 6: 4}, 2), toy_images({3: 5, 4: 2, 0: 3}, 3)]  # fmt: skip
MODULES = {"qkv": ("attn", "qkv"), "proj": ("attn", "proj"),
           "fc1": ("mlp", "fc1"), "fc2": ("mlp", "fc2")}  # fmt: skip
PLACES = [f"{b}.{m}" for b in (0, 1) for m in MODULES]


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(backbone, clients=CLIENTS, **options) -> Federation:
    return Federation.of("lorm", clients, backbone, **{**FAST, **options})


def uploads(fed, round_=0, kind="train") -> UpdateList:
    return UpdateList.of(
        Update(client_id(k), fed.upload(kind, k, round_, 2)) for k in range(len(fed.clients))
    )


def triangle(packed, n) -> np.ndarray:
    square = np.zeros((n, n))
    square[np.triu_indices(n)] = packed
    return square


def linear_of(module, place):
    block, _, name = place.partition(".")
    owner, linear = MODULES[name]
    return getattr(getattr(module.blocks[int(block)], owner), linear)


def inputs_of(backbone, images, delta) -> dict[str, np.ndarray]:
    """Return what each adapted layer gets, (tokens, in), and the features, of a plain copy of the
    backbone with changed weights. The last block's MLP has the class token alone as input."""
    module = copy.deepcopy(backbone.module)
    last = f"{len(module.blocks) - 1}.fc"
    seen: dict[str, np.ndarray] = {}
    for place in PLACES:
        linear = linear_of(module, place)
        with torch.no_grad():
            linear.weight += torch.from_numpy(delta(place)).float()
        read = 1 if place.startswith(last) else None
        linear.register_forward_pre_hook(
            lambda _, given, place=place, read=read: seen.update(
                {place: given[0][:, :read].detach().double().flatten(0, -2).numpy()}
            )
        )
    with torch.no_grad():
        out = module.forward_features(backbone.normalise(images.pictures))
        features = module.forward_head(out, pre_logits=True)
    seen["head"] = features.double().numpy()
    return seen


def product(tensors, place) -> np.ndarray:
    B, A = (tensors[f"lora.{place}.{x}"].astype(np.float64) for x in "BA")
    return B @ A


# --- a round --------------------------------------------------------------------------------


def test_even_rounds_train_b_and_odd_ones_a_and_each_keeps_the_other(backbone):
    fed = federation(backbone)
    fed.open(TASKS[0])
    for round_, factor in enumerate("BAB"):
        before = fed.state
        sent = fed.upload("train", 0, round_, 3)
        assert {n[-1] for n in sent.tensors if n.startswith("lora.")} == {factor}
        assert {n[-1] for n in sent.tensors if n.startswith("root.")} == {factor, "d"}
        fed.round("train", round_, 3)
        for name in (n for n in before.tensors if n.startswith("lora.")):
            same = np.array_equal(before.tensors[name], fed.state.tensors[name])
            assert same == (name[-1] != factor), name
        assert not np.array_equal(
            before.tensors["task.0.head.weight"], fed.state.tensors["task.0.head.weight"]
        )


def test_b_alone_is_trained_if_asked_for(backbone):
    fed = federation(backbone, train="B")
    fed.open(TASKS[0])
    for round_ in (0, 1):
        sent = fed.upload("train", 0, round_, 2)
        assert {n[-1] for n in sent.tensors if n.startswith("lora.")} == {"B"}


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_roots_are_those_of_the_inputs_of_the_model_as_it_classifies(backbone, micro_batch):
    """In the second task: through a copy of the backbone with the weights by their definition."""
    fed = federation(backbone, head_alpha=0.3)
    fed.micro_batch = micro_batch
    fed.run(TASKS[0], 2)
    past, gram = dict(fed.state.tensors), fed.parts().get("gram/0")
    assert gram is not None
    fed.open(TASKS[1])
    for round_, factor in enumerate("BA"):
        sent = fed.upload("train", 0, round_, 2)
        own = {**fed.state.tensors, **sent.tensors}
        images = CLIENTS[0].of(TASKS[1].classes)
        # The current task has no squares yet, so it counts as the mean task: a half of two.
        x = inputs_of(backbone, images, lambda p: (product(past, p) + product(own, p)) / 2)  # noqa: B023
        for place in PLACES:
            got = sent.f32(f"root.{place}.{factor}").astype(np.float64)
            if factor == "B":
                low = x[place] @ own[f"lora.{place}.A"].T.astype(np.float64)
                R = triangle(got, 2)
                expected = low.T @ low / len(low)
                np.testing.assert_allclose(R.T @ R, expected, rtol=1e-3, atol=1e-4)
            else:
                np.testing.assert_allclose(got**2, (x[place] ** 2).mean(0), rtol=1e-3, atol=1e-5)
        R, G = triangle(sent.f32("root.head"), DIM), x["head"].T @ x["head"] / len(images)
        np.testing.assert_allclose(
            R.T @ R, 0.3 * G + 0.7 * np.diag(np.diag(G)), rtol=1e-3, atol=1e-4
        )
        fed.round("train", round_, 2)


def test_the_server_finds_the_least_squares_solution_on_the_clients_own_inputs(backbone):
    fed = federation(backbone, eps=1e-10, head_alpha=1.0, batch_size=64)
    fed.open(TASKS[0])
    sent = [fed.upload("train", k) for k in range(3)]
    state = fed.aggregate(
        "train", UpdateList.of(Update(client_id(k), s) for k, s in enumerate(sent))
    )
    own = [{**fed.state.tensors, **s.tensors} for s in sent]
    seen = [
        inputs_of(backbone, c.of(TASKS[0].classes), lambda p, t=t: product(t, p))
        for c, t in zip(CLIENTS, own, strict=True)
    ]

    def solved(x, W):
        right = np.concatenate([a @ w.T.astype(np.float64) for a, w in zip(x, W, strict=True)])
        return np.linalg.lstsq(np.concatenate(x), right, rcond=None)[0].T

    for place in PLACES:
        A = fed.state.f32(f"lora.{place}.A").astype(np.float64)
        x = [s[place] @ A.T for s in seen]
        B = [t[f"lora.{place}.B"] for t in own]
        expected, plain = solved(x, B), np.mean(B, axis=0)
        got = state.f32(f"lora.{place}.B")
        np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max())
        assert np.abs(got - plain).max() > 10 * np.abs(got - expected).max()


def test_one_client_alone_keeps_what_it_trained_to_the_bit(backbone):
    fed = federation(backbone, CLIENTS[:1])
    for task in TASKS[:2]:
        fed.open(task)
        for round_ in (0, 1, 2):
            sent = fed.upload("train", 0, round_, 3)
            fed.round("train", round_, 3)
            for name in (n for n in sent.tensors if n.startswith("lora.")):
                np.testing.assert_array_equal(fed.state.tensors[name], sent.tensors[name])
            now = fed.state.f32(f"task.{task.index}.head.weight")
            np.testing.assert_array_equal(now, sent.f32("head.weight"))


def test_a_client_of_few_images_describes_nothing_and_counts_in_the_mean_alone(backbone):
    fed = federation(backbone, min_count_upload=4)  # the second client has three
    fed.open(TASKS[0])
    updates = uploads(fed)
    roots = [{n: a for n, a in u.payload.tensors.items() if n.startswith("root.")} for u in updates]
    assert [any(a.any() for a in one.values()) for one in roots] == [True, False, True]
    everywhere = federation(backbone, min_count_upload=100)
    everywhere.open(TASKS[0])
    state = everywhere.aggregate("train", uploads(everywhere))
    counts = np.array([6, 3, 5]) / 14
    mean = np.tensordot(counts, [u.payload.f32("lora.0.fc1.B") for u in updates], 1)
    np.testing.assert_allclose(state.f32("lora.0.fc1.B"), mean, atol=1e-7)


def test_an_update_with_the_other_rounds_factor_is_refused(backbone):
    fed = federation(backbone)
    fed.open(TASKS[0])
    even, odd = fed.upload("train", 0, 0, 2), fed.upload("train", 0, 1, 2)
    with pytest.raises(DataError, match="lacks the B that round 0 of a task trains"):
        fed.aggregate("train", UpdateList.of([Update(client_id(0), odd)]))
    check = fed.exchanges[0].check
    both = Payload({**even.tensors, **odd.tensors})
    assert any("either A or B" in fault for fault in check(both, TASKS[0]))
    other = {n: a for n, a in even.tensors.items() if not n.startswith("root.")}
    mixed = Payload({**other, **{n: a for n, a in odd.tensors.items() if n.startswith("root.")}})
    assert check(mixed, TASKS[0]) == ["roots: expected one for each LoRA tensor, and the head's"]
    assert check(even, TASKS[0]) == check(odd, TASKS[0]) == []


def test_a_capped_client_counts_less_with_its_gram_matrix_too(backbone):
    """The cap of [trust] acts on what the merge sums, not on the mean alone."""
    liar = replace(CLIENTS[0], pictures=CLIENTS[0].pictures.repeat(20, 0),
                   labels=CLIENTS[0].labels.repeat(20))  # fmt: skip
    moved = []
    for share in (1.0, 0.34):
        fed = federation(backbone, [liar, *CLIENTS[1:]], max_weight_share=share, batch_size=512)
        fed.open(TASKS[0])
        updates = uploads(fed)
        state = fed.aggregate("train", updates)
        own = next(iter(updates)).payload.f32("lora.0.fc1.B")
        moved.append(float(np.abs(state.f32("lora.0.fc1.B") - own).mean()))
    assert moved[1] > 2 * moved[0]


def test_a_client_whose_inputs_look_huge_has_no_more_than_the_largest_share(backbone):
    """A merge is pulled by w_k tr(G_k), of which a client chooses the second."""
    fed = federation(backbone, max_weight_share=0.4)
    fed.open(TASKS[0])
    sent = [fed.upload("train", k) for k in range(3)]
    name = "root.0.fc1.B"
    sent[0] = replace(sent[0], tensors={**sent[0].tensors, name: 1000 * sent[0].f32(name)})
    updates = UpdateList.of(Update(client_id(k), s) for k, s in enumerate(sent))
    pulls = capped_pulls(updates, [name], np.array([6, 3, 5]) / 14, 0.4)[name]
    traces = pulls * [np.square(s.f32(name).astype(np.float64)).sum() for s in sent]
    assert traces[0] == pytest.approx(0.4 * traces.sum())
    np.testing.assert_allclose(pulls[1:], [3 / 14, 5 / 14])
    plain = capped_pulls(updates, [name], np.array([6, 3, 5]) / 14, 1.0)[name]
    np.testing.assert_allclose(plain, np.array([6, 3, 5]) / 14)


def test_a_batch_or_a_micro_batch_changes_no_root(backbone):
    """Also of the last block, where passes of few images compute more tokens than are read."""
    roots = []
    for size, micro in ((64, None), (64, 1), (2, None)):
        fed = federation(backbone, batch_size=size, lr_lora=0.0, lr_head=1e-12)
        fed.micro_batch = micro
        fed.open(TASKS[0])
        roots.append(fed.upload("train", 0).f32("root.1.fc1.B"))
    np.testing.assert_allclose(roots[1], roots[0], atol=1e-5)
    np.testing.assert_allclose(roots[2], roots[0], atol=1e-5)


def test_a_training_that_diverged_is_refused_for_its_numbers(backbone):
    """Not by a traceback of the pass that follows it."""
    fed = federation(backbone, lr_lora=1e30)
    fed.open(TASKS[0])
    with pytest.raises(AssertionError, match="'lora.0.fc1.B' holds NaN or infinity") as caught:
        fed.upload("train", 0)
    assert "root" not in str(caught.value)


# --- tasks ----------------------------------------------------------------------------------


def weight_change(fed, place) -> np.ndarray:
    """Return what the model adds to a weight, from its view."""
    tasks = read_tasks(fed.hparams, fed.parts())
    view = merged_tasks_view(fed.backbone, fed.hparams, tasks)
    with torch.no_grad():
        change = linear_of(view, place).weight - linear_of(fed.backbone.module, place).weight
    return change.double().numpy()


def squares(fed, t, place) -> np.ndarray:
    part = fed.parts()[f"gram/{t}"]
    return part.i64("images")[0] * part.f32(f"root.{place}.A").astype(np.float64) ** 2


@pytest.mark.parametrize("merge", ["regmean", "mean"])
def test_tasks_are_merged_by_their_squares_or_by_their_mean(backbone, merge):
    fed = federation(backbone, task_merge=merge)
    loras = []
    for task in TASKS[:2]:
        fed.run(task, 2)
        loras.append(dict(fed.state.tensors))
    for place in PLACES:
        W = [product(t, place) for t in loras]
        D = [np.ones(W[0].shape[1])] * 2 if merge == "mean" else [
            squares(fed, t, place) for t in (0, 1)
        ]  # fmt: skip
        expected = (W[0] * D[0] + W[1] * D[1]) / (D[0] + D[1])
        np.testing.assert_allclose(weight_change(fed, place), expected, atol=1e-6)
    assert ("gram/1" in fed.parts()) == (merge == "regmean")
    assert [e.kind for e in fed.exchanges] == ["train", "finish"][: 2 if merge == "regmean" else 1]


def test_the_squares_of_a_task_are_means_over_all_clients_images(backbone):
    fed = federation(backbone)
    fed.open(TASKS[0])
    for round_ in (0, 1):
        fed.round("train", round_, 2)
    sent = list(uploads(fed, kind="finish"))
    fed.round("finish")
    n = np.array([s.payload.i64("n")[0] for s in sent])
    assert fed.parts()["gram/0"].i64("images").tolist() == [n.sum()]
    for place in PLACES:
        each = np.stack([s.payload.f32(f"root.{place}.A").astype(np.float64) ** 2 for s in sent])
        np.testing.assert_allclose(squares(fed, 0, place), n @ each, rtol=1e-5)


def test_clients_train_on_the_frozen_weights_and_the_tasks_own_lora_alone(backbone):
    """At the start of a task B is zero: the features are those of the backbone itself."""
    fed = federation(backbone)
    fed.run(TASKS[0], 2)
    fed.open(TASKS[1])
    assert np.abs(weight_change(fed, "0.fc1")).max() > 0
    setup = LoraSetup.of(fed.context("train"), read_parts(fed.hparams, fed.parts()))
    pictures = CLIENTS[0].pictures[:4]
    with torch.no_grad():
        features = setup.features(torch.from_numpy(pictures)).numpy()
    np.testing.assert_allclose(features, backbone.features(pictures), atol=1e-5)


def test_every_task_draws_its_own_a_from_the_servers_seed(backbone):
    fed, again = federation(backbone), federation(backbone, seed=1)
    drawn = []
    for f in (fed, again):
        for task in TASKS[:2]:
            f.open(task)
            drawn.append(f.state.f32("lora.0.qkv.A"))
            assert not f.state.f32("lora.0.qkv.B").any()
            f.round("train")
    assert all(not np.array_equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_task_of_one_class_and_one_that_nobody_answers_change_no_old_score(backbone):
    fed = federation(backbone)
    for task in TASKS[:2]:
        fed.run(task, 2)
    pictures = toy_images({3: 2, 5: 2}, 9).pictures
    before = fed.predictor()
    old = before.logits(pictures)
    fed.run(TASKS[2], 2)  # one class
    after = fed.predictor()
    assert after.classes == (*before.classes, 2)
    np.testing.assert_array_equal(after.logits(pictures)[:, : len(before.classes)], old)
    assert "gram/2" not in fed.parts()
    fed.open(TASKS[3])  # and nobody comes
    assert "lora/2" not in fed.parts()
    np.testing.assert_array_equal(fed.predictor().logits(pictures)[:, : len(before.classes)], old)


def test_a_task_whose_squares_nobody_sent_is_not_erased(backbone):
    fed = federation(backbone)
    fed.run(TASKS[0], 2)
    fed.open(TASKS[1])
    for round_ in (0, 1):
        fed.round("train", round_, 2)
    without = dict(fed.state.tensors)
    fed.run(THIRD, 2)
    parts = fed.parts()
    assert "lora/1" in parts
    assert "gram/1" not in parts
    place = "1.fc2"
    D = [squares(fed, t, place) for t in (0, 2)]
    D.insert(1, (D[0] + D[1]) / 2)
    W = [product({n: parts["lora/0"].f32(n) for n in parts["lora/0"].tensors}, place),
         product(without, place), product(fed.state.tensors, place)]  # fmt: skip
    expected = sum(w * d for w, d in zip(W, D, strict=True)) / sum(D)
    np.testing.assert_allclose(weight_change(fed, place), expected, atol=1e-6)


def test_a_finished_tasks_lora_is_a_part_that_stays(backbone):
    fed = federation(backbone)
    fed.run(TASKS[0], 2)
    fed.open(TASKS[1])
    kept = {name: pack(fed.parts()[name]) for name in ("lora/0", "gram/0", "task/0")}
    fed.run(THIRD, 2)
    assert {name: pack(fed.parts()[name]) for name in kept} == kept


# --- options --------------------------------------------------------------------------------


def test_modules_that_overlap_are_refused():
    with pytest.raises(ValidationError, match="qkv holds q and v already"):
        LormHparams(modules=("qkv", "q"))
    assert LormHparams(modules=("q", "v", "proj")).modules == ("q", "v", "proj")


@pytest.mark.parametrize(
    "options", [{"eps": 0.0}, {"head_alpha": 1.1}, {"train": "A"}, {"head_average": "rows"}]
)
def test_options_out_of_their_bounds_are_refused(options):
    with pytest.raises(ValidationError):
        LormHparams(**options)


def test_q_and_v_by_themselves_work_as_well(backbone):
    fed = federation(backbone, modules=["q", "v", "fc2"])
    for task in TASKS[:2]:
        fed.run(task, 2)
    assert set(fed.predictor().classes) == {3, 1, 5, 4}
    assert {n.split(".")[2] for n in fed.state.tensors if n.startswith("lora.")} == {
        "q", "v", "fc2",
    }  # fmt: skip


def test_the_row_of_a_lone_class_is_made_of_the_features_that_it_scores(backbone):
    images = [toy_images({0: 8, 1: 8, 2: 6}, 1), toy_images({0: 8, 1: 8, 2: 6}, 2)]
    fed = federation(backbone, images, lr_lora=0.2, epochs=3)
    first, second = make_tasks([0, 1], [2])
    fed.run(first, 4)
    fed.run(second)
    pixels = torch.from_numpy(np.concatenate([i.of([2]).pictures for i in images]))
    mean = fed.predictor().features(pixels).double().mean(0).numpy()
    with torch.no_grad():
        plain = cls_features(backbone.module, backbone.normalise(pixels)).double().mean(0).numpy()

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    row = fed.state.f32("task.1.head.weight")[0]
    assert cosine(row, mean) == pytest.approx(1, abs=1e-4)
    assert cosine(plain, mean) < 0.99, "the LoRA has moved the features"
