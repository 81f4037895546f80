"""What comes next in a run: the steps of a task in order, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_adapters.contract import Exchange
from fcil_protocol.ids import RunId
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_protocol.payloads.schema import PayloadSchema
from fcil_server.ledger.enums import Outcome
from fcil_server.ledger.rows import RoundRow
from fcil_server.rounds.events import Why
from fcil_server.rounds.schedule import Past, Step, next_masked_step, next_step, task_steps


def exchange(kind: str, rounds: int | None) -> Exchange:
    return Exchange(kind, PayloadSchema(), rounds=rounds)


PREPARE, TRAIN, FINISH = exchange("prepare", 1), exchange("train", None), exchange("finish", 2)


def test_a_task_is_its_exchanges_in_order_then_the_evaluation() -> None:
    assert task_steps((PREPARE, TRAIN, FINISH), 3, task=1, evaluate=True) == (
        Step("prepare", 0, 1),
        Step("train", 0, 3),
        Step("train", 1, 3),
        Step("train", 2, 3),
        Step("finish", 0, 2),
        Step("finish", 1, 2),
        Step(EVALUATE, 0, 1),
    )


def test_without_evaluation_a_task_ends_with_its_last_exchange() -> None:
    assert task_steps((TRAIN,), 1, task=1, evaluate=False) == (Step("train", 0, 1),)


def test_an_exchange_may_be_left_out_with_no_rounds() -> None:
    assert task_steps((exchange("prepare", 0), TRAIN), 1, task=1, evaluate=False) == (
        Step("train", 0, 1),
    )


def test_some_rounds_are_of_the_first_task_alone() -> None:
    once = replace(exchange("train", 1), first_task=True)
    first, later = (task_steps((once, FINISH), 3, task=t, evaluate=False) for t in (0, 1))
    assert [s.kind for s in first] == ["train", "finish", "finish"]
    assert [s.kind for s in later] == ["finish", "finish"]


def test_unlabelled_images_follow_an_evaluation_and_another_one_follows_them() -> None:
    unlabelled = replace(exchange("pseudo", 1), unlabelled=5, keeps_state=True)
    with_them = task_steps((PREPARE, unlabelled), 3, task=0, evaluate=True)
    assert with_them == (
        Step("prepare", 0, 1), Step(EVALUATE, 0, 2), Step("pseudo", 0, 1), Step(EVALUATE, 1, 2),
    )  # fmt: skip
    assert task_steps((PREPARE, unlabelled), 3, task=0, evaluate=False) == (Step("prepare", 0, 1),)


@pytest.mark.parametrize("closed", [7, 8, 100])
def test_after_the_last_step_there_is_none(closed: int) -> None:
    steps = task_steps((PREPARE, TRAIN, FINISH), 3, task=1, evaluate=True)
    assert next_step(steps, closed) is None


kinds = st.lists(st.sampled_from(["prepare", "train", "finish"]), unique=True, max_size=3)


@settings(max_examples=60)
@given(
    kinds,
    st.lists(st.none() | st.integers(0, 4), min_size=3, max_size=3),
    st.integers(1, 5),
    st.booleans(),
)
def test_going_step_by_step_visits_each_round_once(
    names: list[str], rounds: list[int | None], per_task: int, evaluate: bool
) -> None:
    """And each step names its place: index below the number of its kind."""
    exchanges = [exchange(k, r) for k, r in zip(names, rounds, strict=False)]
    steps = task_steps(exchanges, per_task, task=1, evaluate=evaluate)
    walked = []
    while (step := next_step(steps, len(walked))) is not None:
        walked.append(step)
    assert tuple(walked) == steps
    assert len(set(steps)) == len(steps)
    assert all(0 <= s.round < s.rounds for s in steps)
    wanted = sum(per_task if e.rounds is None else e.rounds for e in exchanges) + evaluate
    assert len(steps) == wanted


RUN = RunId("r20261127-120000-0000")
OWN = Step("train", 0, 1)
FIVE = ("mask_keys", "mask_shares", "train", "mask_vote", "unmask")


def walk(
    steps: Sequence[Step],
    fails: Sequence[tuple[str, int]] = (),
    attempts: int = 3,
    masked: Sequence[str] = ("train",),
    gives_up: int = 0,
) -> list[tuple[str, int, int]]:
    """Return the rounds of a task of which some kinds are masked; some of them fail."""
    past: list[Past] = []
    seen: list[tuple[str, int, int]] = []
    given = {"train": gives_up}
    while (step := next_masked_step(steps, past, masked, attempts, (), given)) is not None:
        seen.append((step.kind, step.round, step.rounds))
        past.append(Past(step.kind, (step.kind, step.round) not in fails))
        assert len(seen) < 100
    return seen


def test_a_masked_round_is_five_rounds_and_others_stay_one() -> None:
    steps = [OWN, Step("evaluate", 0, 1)]
    assert walk(steps) == [
        *(("mask_keys", 0, 1), ("mask_shares", 0, 1), ("train", 0, 1), ("mask_vote", 0, 1)),
        *(("unmask", 0, 1), ("evaluate", 0, 1)),
    ]


def test_masked_rounds_are_numbered_on_through_a_task() -> None:
    seen = walk([Step("train", i, 3) for i in range(3)])
    assert [kind for kind, _, _ in seen] == [*FIVE] * 3
    assert [number for _, number, _ in seen] == [0] * 5 + [1] * 5 + [2] * 5
    assert [(n, of) for kind, n, of in seen if kind == "train"] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("kind", FIVE[:4])
def test_what_fails_before_shares_are_given_begins_again_with_new_keys(kind: str) -> None:
    seen = walk([OWN], [(kind, 0)])
    at = FIVE.index(kind)
    assert [k for k, _, _ in seen] == [*FIVE[: at + 1], *FIVE]
    trained = [(n, of) for k, n, of in seen if k == "train"]
    assert trained == ([(0, 1)] if at < 2 else [(0, 1), (1, 2)] if at == 2 else [(0, 1), (1, 1)])


def test_an_unmasking_that_fails_is_not_tried_with_others() -> None:
    assert [k for k, _, _ in walk([OWN], [("unmask", 0)])] == [*FIVE]


def test_attempts_end() -> None:
    seen = walk([OWN, Step("evaluate", 0, 1)], [("mask_keys", i) for i in range(9)])
    assert [k for k, _, _ in seen] == ["mask_keys"] * 3 + ["evaluate"]


@pytest.mark.parametrize(("fails", "trained"), [((0, 1, 2, 3), 4), ((0, 1, 2), 6), ((0, 2), 6)])
def test_training_is_left_out_where_its_first_rounds_failed(
    fails: tuple[int, ...], trained: int
) -> None:
    """Two attempts at a round, and no third round if two failed: nobody has torch, perhaps."""
    steps = [*(Step("train", i, 4) for i in range(4)), Step("finish", 0, 1)]
    failed = [("train", i) for i in fails]
    seen = [k for k, _, _ in walk(steps, failed, 2, ("train", "finish"), gives_up=2)]
    assert seen.count("train") == trained
    assert seen[-5:] == ["mask_keys", "mask_shares", "finish", "mask_vote", "unmask"]


@pytest.mark.parametrize(
    ("kind", "why", "last"),
    [
        ("mask_keys", Why.NO_HOLDER, True),  # too few can do it
        ("mask_shares", Why.NO_HOLDER, False),  # all are away for a while
        ("train", Why.NO_HOLDER, False),
        ("train", Why.REST, True),
        ("train", Why.DEADLINE, False),
    ],
)
def test_another_attempt_follows_where_it_can_be_better(kind: str, why: Why, last: bool) -> None:
    row = RoundRow(
        RUN, 0, kind, 0, 0, 0.0, None, (), 0, 1.0, Outcome.SKIPPED, 0, None, {}, {}, str(why)
    )
    assert Past.of(row) == Past(kind, worked=False, last=last)


def test_the_rest_of_a_task_is_not_attempted_again() -> None:
    past = [Past("mask_keys", worked=False, last=True)]
    assert next_masked_step([OWN], past, {"train"}, 3) is None


@pytest.mark.parametrize("kind", FIVE[2:4])
def test_sums_that_clients_send_once_are_not_asked_for_again(kind: str) -> None:
    past = [Past(k, k != kind) for k in FIVE[: FIVE.index(kind) + 1]]
    assert next_masked_step([OWN], past, {"train"}, 3, {"train"}) is None
    again = next_masked_step([OWN], past, {"train"}, 3)
    assert again == Step("mask_keys", 1, 2, prepares="train")


def test_an_attempt_that_was_given_up_is_passed_over() -> None:
    """Of a fork, the first rounds of a masked one are of its parent."""
    past = [Past("mask_keys", True), Past("mask_shares", True)]
    forked = [*past, *(Past(k, True) for k in FIVE)]
    assert next_masked_step([OWN], forked, {"train"}, 3) is None
    assert next_masked_step([OWN], [*forked, *past], {"train"}, 3) is None
