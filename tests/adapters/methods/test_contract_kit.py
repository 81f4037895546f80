"""What every method must keep, whatever it computes; run over all built-in methods.

Installed third-party methods are checked as well if FCIL_METHODS names them (separated by
spaces), with small options where they share those of built-in ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from adapters.kit import Federation, client_id, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL, small_options
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import State, Update
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.registry import load_half, load_method, make_hparams, method_names
from fcil_adapters.contract.traffic import Cadence
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import pack, unpack
from tiers import OF_EACH_KIND, sampled

# Other ways through a method, each of which takes another path from that of its small options.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("pilora", {"init": "random", "candidates": "all", "total_classes": 7, "blocks": [0, 1]}),
    ("pilora", {"compose": "product_of_sums", "mean_from": "training", "augment": "crop_flip"}),
    ("fed_talora", {"residual": "off", "freeze_a": True, "head_average": "rows"}),
    ("hgp", {"cov": "full", "pool_sharing": "shared", "drop_stale": True}),
    ("hgp", {"head": "quadratic", "own_rank": 2}),
    ("ccvr", {"head": "quadratic", "own_rank": 2}),
    ("hepco", {"weights": "repo", "total_classes": 5}),
    ("fedncm", {"metric": "euclidean"}),
    ("adapt_once", {"adapt": {"rounds": 0}, "features": "linear"}),
    ("analytic", {"features": "linear", "precision": "double", "group": 2}),
    ("analytic", {"form": "ridge", "balance": "plain", "rho": 0.1}),
    ("analytic", {"weights": "capped"}),
    ("analytic", {"projection": 40, "truncate": 3}),
    ("gaussian_head", {"cov": "full", "head": "lda"}),
    ("gaussian_head", {"head": "quadratic", "own_rank": 2}),
    ("lorm", {"train": "B", "task_merge": "mean"}),
]
NAMED = os.environ.get("FCIL_METHODS", "").split()
CASES = [
    *SMALL.items(),
    *((name, {**SMALL[name], **options}) for name, options in VARIANTS),
    *((name, small_options(load_method(name))) for name in NAMED),
]
# One of each kind; methods of third parties that are named to be checked always are.
QUICK = (*OF_EACH_KIND, "plora", "hepco", "l2p", "ewc")
# Task 1 has one class; nobody has class 6; client 2 misses task 1, client 3 has nothing at all.
TASKS = make_tasks([1, 0], [4], [6, 2])
ROUNDS = (2, 2, 1)  # of training, in each
CLIENTS = [
    toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1),
    toy_images({0: 1, 4: 1}, 2),
    toy_images({1: 3, 2: 6}, 3),
    toy_images({}),
]

IDS = [
    *SMALL,
    *(f"{name}-{'-'.join(str(v) for v in options.values())}" for name, options in VARIANTS),
    *NAMED,
]
pytestmark = pytest.mark.parametrize(
    ("name", "options"),
    sampled(CASES, lambda n, o: n in NAMED or (n in QUICK and o in ({}, SMALL.get(n)))),
    ids=IDS,
)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


@pytest.fixture
def fed(name, options, backbone):
    return Federation.of(name, CLIENTS, backbone, **options)


@dataclass
class Story:
    """All tasks of a case, gone through once for several tests.

    Attributes:
        fed: after the last task; only looked at.
        states: what was packed after each task.
        finished: what the parts of tasks that were over held, whenever somebody fetched them.
    """

    fed: Federation
    states: list[bytes] = field(default_factory=list)
    finished: dict[str, set[bytes]] = field(default_factory=dict)

    def go(self) -> Story:
        for task in TASKS:
            self.fed.open(task)
            past = {f"task/{t}" for t in range(task.index)}
            for exchange in self.fed.exchanges:
                rounds = exchange.rounds or ROUNDS[task.index]
                for r in range(rounds):
                    for part, payload in self.fed.parts().items():
                        if part in past:
                            self.finished.setdefault(part, set()).add(pack(payload))
                    self.fed.round(exchange.kind, r, rounds)
            self.states.append(pack(self.fed.state))
        return self


STORIES: dict[str, Story] = {}


@pytest.fixture
def story(name, options, backbone):
    key = f"{name} {options}"
    if key not in STORIES:
        STORIES[key] = Story(Federation.of(name, CLIENTS, backbone, **options)).go()
    return STORIES[key]


def kinds(fed) -> list[str]:
    return [exchange.kind for exchange in fed.exchanges]


def task_parts(fed) -> list[str]:
    """The parts of two finished tasks, of methods that keep something of a task for good."""
    has = "task" in fed.method.broadcast(fed.hparams, fed.backbone.info)
    return ["task/0", "task/1"] if has else []


def test_uploads_and_broadcasts_fit_their_schemas_through_all_tasks(story):
    """`Federation` checks each payload after a trip through bytes."""
    fed = story.fed
    tasks = {name for name in fed.parts() if name.startswith("task/")}
    last = {"task/2"} if fed.method.cadence.get("task") is Cadence.OWN else set()
    assert tasks == {*task_parts(fed)} | last
    assert "current" in fed.parts()
    assert set(fed.predictor().classes) == {0, 1, 2, 4}


def test_state_and_uploads_survive_bytes(fed):
    fed.open(TASKS[0])
    for kind in kinds(fed):
        fed.round(kind)
        assert pack(unpack(pack(fed.state))) == pack(fed.state)
    restored = unpack(pack(fed.state))
    parts = [fed.aggregator.broadcast(fed.context("train"), s) for s in (fed.state, restored)]
    assert [pack(p.payload) for p in parts[0]] == [pack(p.payload) for p in parts[1]]


def test_the_same_federation_twice_gives_the_same_bytes(story, fed):
    for task, rounds, state in zip(TASKS[:2], ROUNDS, story.states, strict=False):
        fed.run(task, rounds)
        assert pack(fed.state) == state


def test_halves_keep_nothing_between_rounds(fed):
    """New instances continue where the old ones stopped; state is all there is."""
    fed.run(TASKS[0])
    fed.open(TASKS[1])
    kind = kinds(fed)[0]
    expected = pack(fed.upload(kind, 0))
    fed.learner, fed.aggregator = load_half(fed.method.learner), load_half(fed.method.aggregator)
    assert pack(fed.upload(kind, 0)) == expected
    assert vars(fed.learner) == vars(fed.aggregator) == {}


def test_aggregation_leaves_its_inputs_alone(fed):
    fed.open(TASKS[0])
    for kind in kinds(fed):
        sent = [Update(client_id(k), fed.upload(kind, k)) for k in range(4)]
        before = [pack(fed.state), *(pack(u.payload) for u in sent)]
        after = fed.aggregate(kind, UpdateList.of(sent))
        assert [pack(fed.state), *(pack(u.payload) for u in sent)] == before
        assert pack(after) != before[0]
        fed.state = after


def test_the_order_of_clients_does_not_matter(fed, name):
    """Clients swap their names, and thereby the order in which their updates are read."""
    if name == "hgp":  # which client is drawn from how often depends on its place
        fed.hparams = fed.hparams.model_copy(update={"rebalance": "off"})
    if name == "gaussian_head":
        fed.hparams = fed.hparams.model_copy(update={"head": "lda"})
    fed.open(TASKS[0])
    for kind in kinds(fed):
        sent = [fed.upload(kind, k) for k in range(3)]
        states = [
            fed.aggregate(
                kind, UpdateList.of(Update(client_id(i), sent[k]) for i, k in enumerate(order))
            )
            for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))
        ]
        for state in states[1:]:
            for tensor, array in states[0].tensors.items():
                # Entries for each name, and rows fitted to what is drawn from them in order.
                if not tensor.startswith(("gauss.", "client.", "calibrated.")):
                    np.testing.assert_allclose(state.tensors[tensor], array, atol=1e-6)
        fed.state = states[0]


def test_clients_without_images_change_nothing(fed, name, options, backbone):
    without = Federation.of(name, CLIENTS[:3], backbone, **options)
    for f in (fed, without):
        f.run(TASKS[0])
    assert pack(fed.state) == pack(without.state)


def test_a_task_of_which_nobody_has_an_image_leaves_its_classes_out(fed):
    fed.run(TASKS[0])
    classes = fed.predictor().classes
    fed.clients = [toy_images({}), toy_images({9: 2})]
    fed.run(TASKS[1])
    assert fed.predictor().classes == classes


def test_one_client_alone_works(fed):
    fed.clients = CLIENTS[:1]
    for task in TASKS:
        fed.run(task)
    assert set(fed.predictor().classes) == {0, 1, 2, 4}
    assert all(np.isfinite(a).all() for a in fed.state.tensors.values())


def test_a_cadence_is_stated_for_kinds_of_parts_that_exist(fed, name, backbone):
    """A misspelt kind would count as one that changes in every round."""
    kinds_of_parts = set()
    for method, options in CASES:
        if method == name:
            hparams = make_hparams(fed.method, options)
            kinds_of_parts |= set(fed.method.broadcast(hparams, backbone.info))
    assert set(fed.method.cadence) <= kinds_of_parts


def test_finished_tasks_are_sent_once(story):
    assert sorted(story.finished) == task_parts(story.fed)
    assert {len(versions) for versions in story.finished.values()} <= {1}


def test_a_late_client_predicts_the_same_from_the_parts_alone(story):
    """Its context is a stranger's: another seed, no backbone of the server, no history."""
    fed = story.fed
    images = toy_images({1: 3, 4: 2, 2: 4}, 7).pictures
    here = fed.predictor()
    late = replace(fed.context("evaluate"), seed=(77,), backbone=None)
    there = load_half(fed.method.model).compose(late, fed.parts(), toy_backbone())
    assert there.classes == here.classes
    np.testing.assert_array_equal(there.logits(images), here.logits(images))


def test_a_broadcast_is_a_function_of_the_state_alone(story):
    fed = story.fed
    other = replace(fed.context("train", 2, 3), task=make_tasks([0], [1])[1], seed=(99,))
    one, two = (
        {p.name: pack(p.payload) for p in fed.aggregator.broadcast(ctx, fed.state)}
        for ctx in (fed.context("train"), other)
    )
    assert one == two


def test_the_backbone_stays_bit_equal(story):
    fed = story.fed
    fed.predictor().logits(CLIENTS[0].pictures)
    module = fed.backbone.module
    assert backbone_digest(module.state_dict()) == fed.backbone.info.digest
    assert not any(p.requires_grad or p.grad is not None for p in module.parameters())
    assert not module.training


def test_progress_never_runs_backwards_and_ends(fed):
    fed.open(TASKS[0])
    for kind in kinds(fed):
        fed.progress.clear()
        fed.upload(kind, 0)
        done = [p.done for p in fed.progress]
        assert done == sorted(done)
        assert fed.progress[-1].done == fed.progress[-1].total


def test_an_upload_of_another_task_is_refused(fed):
    fed.open(TASKS[0])
    kind = kinds(fed)[-1]
    sent = fed.upload(kind, 0)
    exchange = next(e for e in fed.exchanges if e.kind == kind)
    fed.open(TASKS[1])
    assert exchange.upload.check(sent, fed.dims) != []


def test_who_can_be_forgotten_has_left_nothing_in_what_others_send(fed, name, options, backbone):
    """A method says so in its manifest; here the others of a client come and go."""
    if why := fed.method.forgets(fed.hparams):
        assert not why.endswith("."), "it becomes part of a sentence"
        return
    alone = Federation.of(name, CLIENTS[:1], backbone, **options)
    for task in TASKS:
        for f in (fed, alone):
            f.open(task)
        for exchange in fed.exchanges:
            kind = exchange.kind
            if exchange.trains:  # only who has not trained can be forgotten
                for f in (fed, alone):
                    of_all, f.clients = f.clients, CLIENTS[1:3]
                    f.round(kind)
                    f.clients = of_all
                continue
            sent = fed.upload(kind, 0)
            assert pack(sent) == pack(alone.upload(kind, 0))
            held = set(CLIENTS[0].labels.tolist()) & set(task.classes)
            assert classes_with_images(sent, task.classes) == held
            for f in (fed, alone):
                f.round(kind)


def test_names_and_entry_points_agree(fed, name):
    assert name in method_names()
    assert fed.method.name == name
    assert fed.method.title
    assert fed.method.citation
    assert State() == State()
