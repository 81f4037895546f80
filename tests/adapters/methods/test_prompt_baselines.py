"""Averaged prompts, L2P, CODA-Prompt and Fed-CPrompt against their formulas in float64."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch

from adapters.hgp_reference import (
    attention,
    cross_entropy,
    frozen_features,
    logits,
    normalised,
    prompted_feature,
)
from adapters.kit import DIM, Federation, Images, client_id, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from digits import load_digits
from fcil_adapters.backbones.backbone import load_backbone, wrap_backbone
from fcil_adapters.contract import State, Update
from fcil_adapters.contract.registry import load_half, load_method, make_hparams
from fcil_adapters.methods.fed_cprompt.contrast import gap
from fcil_adapters.methods.fed_cprompt.options import FedCPromptHparams
from fcil_adapters.methods.l2p.sequence import SequenceView, chosen
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.prompts.parts import read_parts
from fcil_adapters.toolkit.prompts.pools import component_weights, orthogonality
from fcil_protocol.errors import ConfigError, DataError, SchemaMismatch
from fcil_protocol.payloads.payload import Payload, pack
from tiers import sampled

BASELINES = ("fedavg_prompt", "l2p", "coda_prompt", "fed_cprompt")
TASKS = make_tasks([3, 4], [7, 2], [5, 9])
EVERY = (3, 4, 7, 2, 5, 9)
CLIENTS = [toy_images(dict.fromkeys(EVERY, 5), 1), toy_images({3: 3, 4: 1, 7: 4, 2: 2, 9: 6}, 2)]
IMAGES = toy_images({7: 4, 2: 3}, seed=4)
WHOLE = {"batch_size": 64, "augment": "none"}  # so that the first loss is of all images


def federation(name, clients=CLIENTS, tasks=1, rounds=1, **options) -> Federation:
    """One in which so many tasks are over."""
    fed = Federation.of(name, clients, **{**SMALL[name], **options})
    for task in TASKS[:tasks]:
        fed.run(task, rounds)
    return fed


def first_loss(fed: Federation) -> float:
    fed.progress.clear()
    fed.upload("train", 0)
    loss = fed.progress[0].loss
    assert loss is not None
    return loss


def cosine(a, b) -> float:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def head_of(fed: Federation, features, classes=None) -> np.ndarray:
    """Scores of the current classes, or of all of them."""
    model = read_parts(fed.parts())
    rows = slice(-len(fed.task.classes), None) if classes is None else slice(None)
    return logits(features, model.head.weight[rows], model.head.bias[rows])


def rows_of(fed: Federation, images) -> np.ndarray:
    return np.array([fed.task.classes.index(int(c)) for c in images.labels])


# --- averaged prompts -----------------------------------------------------------------------


@pytest.mark.parametrize("average", ["uniform", "samples"])
def test_averaged_prompts_are_hepcos_provisional_server(average):
    """Bit for bit, through tasks and rounds in which somebody has each class."""
    options = {**SMALL["fedavg_prompt"], "average": average}
    ours = federation("fedavg_prompt", tasks=2, rounds=2, **options)
    theirs = Federation.of("hepco", CLIENTS, distill="none", **options)
    for task in TASKS[:2]:
        theirs.run(task, 2)
    names = ("prompt.0", "key.0", "prompt.1", "key.1", "head.weight", "head.bias")
    for name in names:
        np.testing.assert_array_equal(ours.state.tensors[name], theirs.state.tensors[name])
    pictures = IMAGES.pictures
    np.testing.assert_array_equal(
        ours.predictor().logits(pictures), theirs.predictor().logits(pictures)
    )


# --- what all of them share -----------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINES)
def test_prompts_and_rows_are_weighted_means(name):
    fed = federation(name, tasks=1, average="samples")
    fed.open(TASKS[1])
    sent = [fed.upload("train", k) for k in range(2)]
    after = fed.aggregate(
        "train", UpdateList.of(Update(client_id(k), p) for k, p in enumerate(sent))
    )
    fed.state = after
    now = fed.parts()
    held = {n: a for part in now.values() for n, a in part.tensors.items() if "prompt" in n}
    held |= dict(now["current"].tensors)
    for tensor in {n for n in sent[0].tensors if n.startswith(("prompt", "head"))}:
        one, two = (p.f32(tensor).astype(np.float64) for p in sent)
        np.testing.assert_allclose(held[tensor], (10 * one + 6 * two) / 16, atol=1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_the_row_of_a_class_that_nobody_has_this_round_stays(name):
    fed = federation(name, tasks=1)
    fed.open(TASKS[1])
    fed.round()
    before = fed.state.f32("head.weight")
    fed.clients = [toy_images({7: 4})]
    fed.round(round_=1)
    after = fed.state.f32("head.weight")
    assert not np.array_equal(after[2], before[2])
    np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))
    assert fed.predictor().classes == (3, 4, 7, 2)


@pytest.mark.parametrize("name", BASELINES)
def test_a_lone_class_gets_its_federated_mean_as_long_as_past_rows(name):
    fed = Federation.of(name, [toy_images({0: 4, 1: 4, 6: 5}), toy_images({0: 4, 6: 2}, 1)],
                        **SMALL[name])  # fmt: skip
    first, second = make_tasks([0, 1], [6])
    fed.run(first)
    past = fed.state.f32("head.weight")
    fed.open(second)
    sent = [fed.upload("train", k) for k in range(2)]
    means = [p.f32("head.weight")[0].astype(np.float64) for p in sent]
    fed.round()
    mean = (5 * means[0] + 2 * means[1]) / 7
    length = np.linalg.norm(past.astype(np.float64), axis=1).mean()
    row = fed.state.f32("head.weight")[2]
    np.testing.assert_allclose(row, mean * length / np.linalg.norm(mean), atol=1e-5)
    assert fed.state.f32("head.bias")[2] == 0


@pytest.mark.parametrize("name", BASELINES)
def test_one_client_is_local_training(name):
    fed = federation(name, CLIENTS[:1], tasks=0)
    fed.open(TASKS[0])
    sent = fed.upload("train", 0)
    fed.round()
    np.testing.assert_array_equal(fed.state.f32("head.weight"), sent.f32("head.weight"))


@pytest.mark.parametrize("name", BASELINES)
def test_a_broadcast_that_lacks_a_part_is_refused(name):
    fed = federation(name, tasks=2)
    parts = fed.parts()
    ctx = fed.context("train")
    for missing in parts:
        less = {n: p for n, p in parts.items() if n != missing}
        with pytest.raises(SchemaMismatch, match="lacks the part"):
            load_half(fed.method.learner).run(ctx, State(), less, CLIENTS[0].of([7, 2]))


@pytest.mark.parametrize("name", BASELINES)
def test_each_has_a_short_preset_and_names_a_block_that_the_backbone_lacks(name):
    method = load_method(name)
    assert "short" in method.presets
    if "blocks" in method.hparams.model_fields:
        for schemas in (method.exchanges, method.broadcast):
            with pytest.raises(ConfigError, match="block 2 does not exist"):
                schemas(make_hparams(method, {}), toy_backbone().info)


@pytest.mark.parametrize("name", ["l2p", "fed_cprompt"])  # the others train as HePCo does
def test_queries_of_views_and_micro_batches(name):
    """The same effective batch in pieces; a query of each view is another query."""
    sent = {}
    for key, options in (
        ("whole", {}),
        ("pieces", {"micro_batch": 2}),
        ("view", {"query": "view", "augment": "crop_flip"}),
        ("canonical", {"augment": "crop_flip"}),
    ):
        fed = federation(name, tasks=1, batch_size=7, **options)
        fed.open(TASKS[1])
        fed.round()  # so that the server is another one than the task began with
        sent[key] = fed.upload("train", 0, 1, 2).tensors
    for tensor, array in sent["whole"].items():
        np.testing.assert_allclose(sent["pieces"][tensor], array, atol=2e-3, err_msg=tensor)
    key = next(n for n in sent["view"] if n.startswith("prompt"))
    assert not np.array_equal(sent["view"][key], sent["canonical"][key])


# --- L2P ------------------------------------------------------------------------------------


def chosen_by_hand(query, keys, k) -> list[int]:
    cosines = [cosine(query, key) for key in keys]
    return sorted(range(len(keys)), key=lambda m: -cosines[m])[:k]


def sequence_features(backbone, images, model, k, feature="prompts") -> np.ndarray:
    """Image by image in float64: class token, the prompts in their order, the image's patches."""
    module = copy.deepcopy(backbone.module).double()
    queries = frozen_features(backbone, images)
    rows = []
    for query, picture in zip(queries, normalised(images), strict=True):
        best = chosen_by_hand(query, model["key.pool"], k)
        own = torch.tensor(np.concatenate([model["prompt.pool"][m] for m in best])).double()
        with torch.no_grad():
            tokens = module._pos_embed(module.patch_embed(picture[None]))[0]
            x = torch.cat([tokens[:1], own, tokens[1:]])
            for block in module.blocks:
                x = x + attention(block.attn, block.norm1(x), None)
                x = x + block.mlp(block.norm2(x))
            out = module.norm(x).numpy()
        first, last = {"prompts": (1, None), "token": (0, 1), "token_and_prompts": (0, None)}[
            feature
        ]
        rows.append(out[: 1 + len(own)][first:last].mean(0))
    return np.stack(rows)


class TestL2p:
    def test_takes_the_prompts_with_the_nearest_keys(self):
        rng = np.random.default_rng(3)
        cosines = torch.tensor(rng.normal(size=(6, 9)))
        taken = chosen(cosines, 4)
        for row, own in zip(taken.numpy(), cosines.numpy(), strict=True):
            assert row.argmax(1).tolist() == np.argsort(-own)[:4].tolist()
            assert row.sum(1).tolist() == [1] * 4

    def test_batchwise_all_take_what_most_would_and_of_equals_the_first(self):
        cosines = torch.tensor([[9.0, 8, 1, 0], [0, 9, 1, 8], [0, 1, 8, 9]])
        taken = chosen(cosines, 2, batchwise=True)  # votes 1, 2, 1, 2
        assert taken.argmax(2).tolist() == [[1, 3]] * 3
        taken = chosen(torch.tensor([[9.0, 8, 1, 0], [0, 1, 8, 9]]), 2, batchwise=True)
        assert taken.argmax(2).tolist() == [[0, 1]] * 2

    @pytest.mark.parametrize("feature", ["prompts", "token", "token_and_prompts"])
    def test_scores_are_those_of_the_sequence_with_prompts(self, feature):
        fed = federation("l2p", tasks=2, feature=feature)
        model = read_parts(fed.parts())
        f = sequence_features(fed.backbone, IMAGES, model.prompts[0], 2, feature)
        predictor = fed.predictor()
        assert predictor.classes == (3, 4, 7, 2)
        np.testing.assert_allclose(
            predictor.logits(IMAGES.pictures), head_of(fed, f, "all"), atol=1e-3
        )

    @pytest.mark.parametrize("pull", [0.0, 0.5, 2.0])
    def test_the_objective_pulls_chosen_keys(self, pull):
        fed = federation("l2p", [IMAGES], tasks=1, pull=pull, **WHOLE)
        fed.open(TASKS[1])
        model = read_parts(fed.parts()).prompts[0]
        f = sequence_features(fed.backbone, IMAGES, model, 2)
        expected = cross_entropy(head_of(fed, f), rows_of(fed, IMAGES))
        for query in frozen_features(fed.backbone, IMAGES):
            best = chosen_by_hand(query, model["key.pool"], 2)
            expected -= pull * sum(cosine(query, model["key.pool"][m]) for m in best) / len(IMAGES)
        assert first_loss(fed) == pytest.approx(expected, rel=1e-4)

    def test_keys_move_by_the_pull_alone(self):
        for pull, moves in ((0.0, False), (0.5, True)):
            fed = federation("l2p", tasks=0, pull=pull)
            fed.open(TASKS[0])
            before = fed.state.f32("key.pool")
            fed.round()
            assert np.array_equal(fed.state.f32("key.pool"), before) != moves

    def test_more_prompts_than_the_pool_has_are_refused(self):
        with pytest.raises(
            ConfigError, match="top_k = 5 prompts cannot be chosen from a pool of 3"
        ):
            make_hparams(load_method("l2p"), {"pool_size": 3})

    def test_a_transformer_with_a_pass_of_its_own_is_refused(self):
        backbone = toy_backbone()
        module = copy.deepcopy(backbone.module)
        module.__class__ = type("Own", (type(module),), {"forward_features": lambda s, x: x})
        own = wrap_backbone(module, "own", backbone.info.preprocessing)
        with pytest.raises(DataError, match="'own' has a forward pass of its own"):
            SequenceView(own, "prompts")


# --- CODA-Prompt ----------------------------------------------------------------------------


def component_prompt(query, sets, block) -> np.ndarray:
    """sum_m cos(q * A_m, K_m) P_m over the components of all tasks, by a loop."""
    total = 0.0
    for tensors in sets:
        for A, K, P in zip(
            tensors[f"key.{block}.attention"], tensors[f"key.{block}"], tensors[f"prompt.{block}"],
            strict=True,
        ):  # fmt: skip
            total = total + cosine(query * A.astype(np.float64), K) * P.astype(np.float64)
    return total


def component_features(backbone, images, sets) -> np.ndarray:
    rows = []
    for query, picture in zip(frozen_features(backbone, images), normalised(images), strict=True):
        prompts = {b: component_prompt(query, sets, b) for b in (0, 1)}
        rows.append(prompted_feature(backbone, picture, prompts))
    return np.stack(rows)


class TestComponents:
    def test_weights_are_cosines_of_the_attended_query(self):
        rng = np.random.default_rng(0)
        q, K, A = (rng.normal(size=(n, DIM)) for n in (4, 3, 3))
        weights = component_weights(*(torch.tensor(x) for x in (q, K, A)))
        for b, m in itertools.product(range(4), range(3)):
            assert weights[b, m] == pytest.approx(cosine(q[b] * A[m], K[m]), abs=1e-9)

    def test_an_attention_of_zeros_gives_no_nan(self):
        A = torch.zeros(2, DIM, requires_grad=True)
        component_weights(torch.ones(1, DIM), torch.ones(2, DIM), A).sum().backward()
        assert torch.isfinite(A.grad).all()

    @pytest.mark.parametrize("name", ["coda_prompt", "fed_cprompt"])
    def test_scores_use_the_components_of_all_tasks(self, name):
        fed = federation(name, tasks=3)
        f = component_features(fed.backbone, IMAGES, read_parts(fed.parts()).prompts)
        np.testing.assert_allclose(
            fed.predictor().logits(IMAGES.pictures), head_of(fed, f, "all"), atol=1e-3
        )

    @pytest.mark.parametrize("weight", [0.0, 0.7])
    def test_the_objective_is_cross_entropy_and_the_penalty(self, weight):
        fed = federation("coda_prompt", [IMAGES], tasks=1, orthogonality=weight, **WHOLE)
        fed.open(TASKS[1])
        sets = read_parts(fed.parts()).prompts
        f = component_features(fed.backbone, IMAGES, sets)
        expected = cross_entropy(head_of(fed, f), rows_of(fed, IMAGES))
        for name in sets[0]:
            x = np.concatenate([s[name].reshape(len(s[name]), -1) for s in sets]).astype(np.float64)
            expected += weight * np.square(x @ x.T - np.eye(len(x))).mean()
        assert first_loss(fed) == pytest.approx(expected, rel=1e-4)
        assert orthogonality({"x": torch.eye(3)}) == 0

    def test_new_components_are_orthonormal_and_orthogonal_to_trained_ones(self):
        fed = federation("coda_prompt", tasks=2, rounds=2)
        fed.open(TASKS[2])
        for name in ("prompt.0", "key.1", "key.0.attention"):
            past = np.concatenate([fed.state.f32(f"task.{t}.{name}") for t in (0, 1)])
            new = fed.state.f32(f"task.2.{name}").reshape(2, -1)
            np.testing.assert_allclose(new @ new.T, np.eye(2), atol=1e-5)
            assert np.abs(new @ past.reshape(4, -1).T).max() < 1e-4

    def test_past_components_and_rows_stay_and_the_tasks_own_move(self):
        fed = federation("coda_prompt", tasks=1)
        fed.open(TASKS[1])
        before = fed.parts()
        fed.round()
        after = fed.parts()
        for name in ("prompts/0", "task/0"):
            assert pack(after[name]) == pack(before[name])
        moved = after["prompts/1"].tensors
        for name, array in before["prompts/1"].tensors.items():
            assert not np.array_equal(moved[name], array), name


# --- Fed-CPrompt ----------------------------------------------------------------------------


def contrast_by_hand(h, local, server, previous) -> float:
    total = 0.0
    for l, s, p in zip(local, server, previous, strict=True):  # noqa: E741
        total += h.near * sum((a - b) ** 2 for a, b in zip(l, s, strict=True))
        total -= h.far * sum((a - b) ** 2 for a, b in zip(l, p, strict=True))
    return total


class TestContrast:
    def test_is_near_to_the_server_and_far_from_the_previous_task(self):
        rng = np.random.default_rng(1)
        local, server, previous = (rng.normal(size=(3, 4)) for _ in range(3))
        h = FedCPromptHparams(near=3.0, far=0.5)
        found = gap(h, *(torch.tensor(x) for x in (local, server, previous)))
        assert found == pytest.approx(contrast_by_hand(h, local, server, previous))

    @pytest.mark.parametrize(("far", "margin"), [(1e-3, 1.0), (1e-3, 5.0), (1e3, 1.0)])
    def test_the_first_loss_is_cross_entropy_and_the_hinge(self, far, margin):
        """At the first step the client is the server; with a large ``far`` the hinge is shut."""
        fed = federation("fed_cprompt", [IMAGES], tasks=1, far=far, margin=margin, **WHOLE)
        fed.open(TASKS[1])
        began = fed.parts()
        fed.round()
        model = read_parts(fed.parts())
        f = component_features(fed.backbone, IMAGES, model.prompts)
        before = read_parts(began)  # the head as the previous task's server has it
        f_before = component_features(fed.backbone, IMAGES, before.prompts[:1])
        local = logits(f, model.head.weight, model.head.bias)
        previous = logits(f_before, before.head.weight, before.head.bias)
        h = fed.hparams
        expected = cross_entropy(local[:, 2:], rows_of(fed, IMAGES))
        expected += max(contrast_by_hand(h, local, local, previous) + margin, 0)
        assert first_loss(fed) == pytest.approx(expected, rel=1e-4)

    def test_a_shut_hinge_is_no_contrast_and_an_open_one_holds_the_client(self):
        moved = {}
        for key, options in (
            ("none", {"contrast": 0.0}), ("shut", {"far": 1e9}), ("open", {"far": 0.0}),
        ):  # fmt: skip
            fed = federation("fed_cprompt", tasks=1, **options)
            fed.open(TASKS[1])
            moved[key] = fed.upload("train", 0).tensors
        for name, array in moved["none"].items():
            np.testing.assert_array_equal(moved["shut"][name], array)
        assert not np.array_equal(moved["open"]["prompt.0"], moved["none"]["prompt.0"])

    def test_in_mixed_precision_the_client_begins_where_the_server_is(self):
        """A factor of a thousand would make a loss of what only rounding tells apart."""
        losses = []
        for contrast in (0.0, 1.0):
            fed = federation(
                "fed_cprompt", [IMAGES], tasks=1, far=0.0, margin=0.0, contrast=contrast, **WHOLE
            )
            fed.open(TASKS[1])
            fed.backbone.choose_precision("amp")
            losses.append(first_loss(fed))
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("far", [0.0, 1e9])
    def test_a_batch_in_pieces_has_one_hinge(self, far):
        """Open or shut over the whole batch, whatever its pieces would do by themselves."""
        sent = []
        for micro_batch in (None, 2):
            fed = federation("fed_cprompt", tasks=1, far=far, near=1.0, **WHOLE)
            fed.open(TASKS[1])
            fed.round()
            fed.micro_batch = micro_batch
            sent.append(fed.upload("train", 0, 1, 2).tensors)
        for name, array in sent[0].items():
            np.testing.assert_allclose(sent[1][name], array, atol=1e-3, err_msg=name)

    def test_the_first_task_has_nothing_to_contrast_with(self):
        with_it, without = (federation("fed_cprompt", contrast=c) for c in (1.0, 0.0))
        assert pack(with_it.state) == pack(without.state)
        assert "first" not in with_it.parts()

    def test_the_previous_teacher_comes_from_parts_that_a_late_client_has(self):
        """What it says of past classes is what that server's predictor said."""
        fed = federation("fed_cprompt", tasks=1)
        ended = fed.predictor().logits(IMAGES.pictures)
        fed.open(TASKS[1])
        drawn = fed.state.f32("head.weight")[2:]
        for r in range(2):
            fed.round(round_=r, rounds=2)
        parts = fed.parts()
        np.testing.assert_array_equal(parts["first"].f32("head.weight"), drawn)
        model = read_parts(parts)
        f = component_features(fed.backbone, IMAGES, model.prompts[:1])
        np.testing.assert_allclose(
            logits(f, model.head.weight[:2], model.head.bias[:2]), ended, atol=1e-3
        )
        fed.open(TASKS[2])
        assert fed.parts()["first"].f32("head.weight").shape == (2, DIM)
        assert not np.array_equal(fed.parts()["first"].f32("head.weight"), drawn)


# --- whole federations ----------------------------------------------------------------------


def right_within(fed: Federation, images) -> float:
    """How many images are right among the classes of their own task.

    Nothing in these methods weighs one task's rows against another's, so that is what they learn.
    """
    predictor = fed.predictor()
    classes = sorted(set(images.labels.tolist()))
    columns = [predictor.classes.index(c) for c in classes]
    best = predictor.logits(images.pictures)[:, columns].argmax(1)
    return float((np.array(classes)[best] == images.labels).mean())


@pytest.mark.parametrize("name", sampled(BASELINES, ("l2p", "coda_prompt")))
def test_a_federation_learns_its_last_task(name):
    """The published contrast holds a client for many rounds; in two, a weight lets it go."""
    clients = [toy_images(dict.fromkeys(EVERY, 8), seed) for seed in (1, 2)]
    free = {"contrast": 1e-5} if name == "fed_cprompt" else {}
    pixels = "normalised"
    fed = federation(name, clients, tasks=2, rounds=2, epochs=8, lr=2e-2, pixels=pixels, **free)
    assert right_within(fed, toy_images({7: 10, 2: 10}, 5)) > 0.8


@pytest.mark.full
@pytest.mark.parametrize("name", BASELINES)
def test_a_federation_learns_digits_on_the_embedded_backbone(name):
    """Two tasks of two digits, two clients, the preset for small backbones; by chance 0.5."""
    digits = load_digits()
    grey = np.kron(digits.images * 255 / 16, np.ones((4, 4)))  # 8 x 8 -> 32 x 32
    pictures = np.repeat(grey[..., None], 3, axis=3).astype(np.uint8)
    own = [np.flatnonzero(digits.target == c)[:160] for c in range(4)]
    sides = [
        np.concatenate([one[i : i + n] for one in own]) for i, n in ((0, 40), (40, 40), (80, 80))
    ]
    *clients, test = (Images(pictures[i], digits.target[i].astype(np.int64)) for i in sides)
    fed = Federation.of(name, clients, load_backbone(), preset="short", augment="jitter")
    for task in make_tasks([0, 1], [2, 3]):
        fed.run(task, rounds=4)
    # Of 160 images: over two deviations from chance.
    assert right_within(fed, test.of([2, 3])) > 0.6


@pytest.mark.parametrize("name", BASELINES)
def test_an_upload_that_is_not_finite_never_arrives(name):
    fed = federation(name, tasks=1)
    fed.open(TASKS[1])
    sent = fed.upload("train", 0)
    bad = np.array(sent.f32("head.weight"))
    bad[0, 0] = math.nan
    schema = fed.exchanges[0].upload
    assert schema.check(Payload({**sent.tensors, "head.weight": bad}), fed.dims) != []


def test_no_weight_is_above_its_cap():
    clients = [
        toy_images({3: 20, 4: 20}, 1),
        toy_images({3: 2, 4: 2}, 2),
        toy_images({3: 2, 4: 2}, 3),
    ]
    fed = federation("l2p", clients, tasks=0, max_weight_share=0.5)
    fed.open(TASKS[0])
    sent = [fed.upload("train", k) for k in range(3)]
    fed.round()
    stack = np.stack([p.f32("prompt.pool") for p in sent]).astype(np.float64)
    expected = np.tensordot([0.5, 0.25, 0.25], stack, 1)
    np.testing.assert_allclose(fed.state.f32("prompt.pool"), expected, atol=1e-6)
