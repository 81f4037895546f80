"""Images counted late: the result is that of a federation in which no client slept."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.frozen_kit import Colours, pooled
from adapters.kit import Federation, make_tasks, toy_images
from fcil_adapters.contract import registry
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.local_images import counted_digests
from fcil_adapters.toolkit.closed_form.sums import joined
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.builtin import LATE

COLOURS = Colours()
TASKS = make_tasks([0, 1], [2, 3], [4])
CLIENTS = [
    toy_images({0: 12, 1: 9, 2: 7, 4: 8}, 1),
    toy_images({0: 5, 2: 9, 3: 11, 4: 6}, 2),
    toy_images({1: 8, 3: 6, 2: 5}, 3),
]
EXACT = {
    "analytic": {"precision": "double", "projection": 24},
    "adapt_once": {"precision": "double", "projection": 24, "adapt": {"rounds": 0}},
    "fedncm": {},
    "running_mean": {},
    "gaussian_head": {"head": "lda", "cov": "full"},
}
FEW = {"gaussian_head": {"min_count_upload": 4}, "analytic": {"group": 4}}


def federation(name: str, clients=CLIENTS, *, late: str = "count", **more) -> Federation:
    return Federation.of(name, clients, COLOURS, late=late, **EXACT[name], **more)


def scores(fed: Federation) -> np.ndarray:
    return fed.predictor().logits(pooled(CLIENTS).pictures)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_who_sleeps_through_two_tasks_is_counted_as_if_it_had_not(name):
    awake, slept = federation(name), federation(name)
    slept.asleep = {1}
    for task in TASKS[:2]:
        awake.run(task)
        slept.run(task)
    assert not np.allclose(scores(awake), scores(slept)), (
        "the sleeping client's images change the scores"
    )
    slept.asleep = {0, 2}
    slept.round(LATE)
    slept.asleep = set()
    np.testing.assert_allclose(scores(slept), scores(awake), rtol=1e-4, atol=1e-5)
    awake.run(TASKS[2])
    slept.run(TASKS[2])
    np.testing.assert_allclose(scores(slept), scores(awake), rtol=1e-4, atol=1e-5)


def test_the_sums_are_those_of_no_delay_to_the_last_digits():
    awake, slept = federation("analytic"), federation("analytic")
    slept.asleep = {1}
    for task in TASKS[:2]:
        awake.run(task)
        slept.run(task)
    slept.asleep = {0, 2}
    slept.round(LATE)
    for name in ("total.triangle", "total.sum", "total.count", "total.observations"):
        got, wanted = (joined(fed.state.tensors, name) for fed in (slept, awake))
        assert np.linalg.norm(got - wanted) <= 1e-13 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("name", ["analytic", "fedncm"])
def test_images_that_come_later_join_those_of_their_class(name):
    first = [images.of([0, 1, 2, 3]) for images in CLIENTS]
    early = [type(one)(one.pictures[::2], one.labels[::2]) for one in first]
    grown, whole = federation(name, early), federation(name, first)
    for task in TASKS[:2]:
        grown.run(task)
        whole.run(task)
    grown.clients = first
    grown.round(LATE)
    np.testing.assert_allclose(scores(grown), scores(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_an_image_is_counted_once_however_often_it_is_asked_for(name):
    fed = federation(name)
    fed.run(TASKS[0])
    before = fed.state
    sent = fed.upload(LATE, 0)
    assert sent.i64("n").tolist() == [0]
    assert classes_with_images(sent, fed.task.seen) == set()
    fed.round(LATE)
    assert fed.state is before


@pytest.mark.parametrize("name", sorted(FEW))
def test_too_few_images_of_a_class_wait_for_more(name):
    few = [toy_images({0: 6, 1: 3}, 1)]
    options = {k: v for k, v in EXACT[name].items() if k not in FEW[name]} | FEW[name]
    fed = Federation.of(name, few, COLOURS, late="count", **options)
    fed.run(TASKS[0])
    counted = counted_digests(fed._counted[0])
    assert len(counted) == 6, "three of class 1 are too few"
    more = toy_images({1: 2}, 9)
    fed.clients = [pooled([few[0], more])]
    assert fed.upload(LATE, 0).i64("n").tolist() == [5]


def test_classes_of_a_finished_task_that_are_not_late_keep_their_bytes():
    fed = federation("fedncm")
    fed.asleep = {2}
    for task in TASKS[:2]:
        fed.run(task)
    kept = fed.parts()["task/0"]
    fed.clients = [*CLIENTS[:2], CLIENTS[2].of([3])]
    fed.asleep = {0, 1}
    fed.round(LATE)
    after = fed.parts()["task/0"]
    assert all((kept.tensors[n] == after.tensors[n]).all() for n in kept.tensors)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("analytic", {"truncate": 8}),
        ("analytic", {"weights": "capped"}),
        ("pilora", {}),
        ("hgp", {}),
    ],
)
def test_what_cannot_be_counted_late_is_refused_by_name(name, options):
    method = registry.load_method(name)
    with pytest.raises(ConfigError, match=r"late"):
        registry.make_hparams(method, {"late": "count", **options})


def test_a_cap_on_weights_does_not_depend_on_who_was_late():
    plain, capped = federation("fedncm"), federation("fedncm", max_weight_share=0.4)
    for fed in (plain, capped):
        fed.run(TASKS[0])
    np.testing.assert_array_equal(scores(plain), scores(capped))
    method = registry.load_method("fedncm")
    assert "counts once" in method.uncapped(registry.make_hparams(method, {"late": "count"}))
    assert method.uncapped(registry.make_hparams(method, {})) == ""


@pytest.mark.parametrize("name", sorted(EXACT))
def test_without_the_option_there_is_no_late_exchange(name):
    method = registry.load_method(name)
    options = {k: v for k, v in EXACT[name].items() if k == "adapt"}
    exchanges = method.exchanges(registry.make_hparams(method, options), COLOURS.info)
    assert not any(e.late or e.counts_once for e in exchanges)
