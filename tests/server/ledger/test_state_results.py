"""Test results of states, and the best one: among those that know the most classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import sample_run
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.tasks import StateResult
from sample_run import ALICE, BOB, RUN, Clock, digest


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock):
    with Ledger(tmp_path / "ledger.sqlite", clock=clock) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


def rounds(ledger: Ledger, task: int, right: Sequence[int | None]) -> None:
    """Add a task whose rounds make states; of 10 images each gets so many right, if tested."""
    ledger.tasks.open(RUN, task, [2 * task, 2 * task + 1])
    for number, correct in enumerate(right):
        newest = ledger.states.newest(RUN)
        state = 0 if newest is None else newest.state + 1
        key = RoundKey(RUN, task, "train", number)
        ledger.rounds.open(key, asked=(ALICE,), base_state=max(state - 1, 0))
        ledger.states.add(key, state, digest(f"state {state}"), None)
        tested = {} if correct is None else {"test_correct": correct, "test_total": 10}
        ledger.rounds.close(key, "done", new_state=state, metrics=tested)


def best(ledger: Ledger) -> StateResult:
    found = ledger.evaluations.best(RUN)
    assert found is not None
    return found


def test_no_state_is_the_best_before_any_is_tested(ledger: Ledger) -> None:
    assert ledger.evaluations.best(RUN) is None
    rounds(ledger, 0, [None, None])
    assert ledger.evaluations.best(RUN) is None
    assert ledger.evaluations.of_states(RUN, 0) == []


def test_the_best_state_is_of_the_last_tested_task(ledger: Ledger) -> None:
    """States that know fewer classes are no rivals, however well they do."""
    rounds(ledger, 0, [9, 10, 8])
    assert best(ledger) == StateResult(1, 0, 10, 10, central=True)
    rounds(ledger, 1, [4, None, 6, 5])
    assert best(ledger) == StateResult(5, 1, 6, 10, central=True)
    assert best(ledger).accuracy == 60.0
    rounds(ledger, 2, [None])
    assert best(ledger).state == 5, "an untested task has none"


def test_of_equal_states_the_newest_is_the_best(ledger: Ledger) -> None:
    rounds(ledger, 0, [3, 7, 7, 2])
    assert best(ledger).state == 2


def test_the_test_after_a_task_is_of_its_last_state(ledger: Ledger) -> None:
    rounds(ledger, 0, [3, 7, None])
    ledger.evaluations.add(RUN, 0, CENTRAL, {0: (8, 10), 1: (9, 10)})
    results = ledger.evaluations.of_states(RUN, 0)
    assert [(r.state, r.correct, r.total) for r in results] == [(0, 3, 10), (1, 7, 10), (2, 17, 20)]
    assert best(ledger).state == 2


def test_clients_test_the_state_that_their_evaluation_began_with(ledger: Ledger) -> None:
    """Their results count where the server's folder has none."""
    rounds(ledger, 0, [None, None])
    key = RoundKey(RUN, 0, EVALUATE, 0)
    ledger.rounds.open(key, asked=(ALICE,), base_state=1)
    ledger.evaluations.add(RUN, 0, ALICE, {0: (1, 4)})
    assert ledger.evaluations.best(RUN) is None, "its evaluation is not over"
    ledger.rounds.close(key, "done")
    ledger.evaluations.add(RUN, 0, BOB, {1: (2, 2)})
    assert best(ledger) == StateResult(1, 0, 3, 6, central=False)
    ledger.evaluations.add(RUN, 0, CENTRAL, {0: (5, 5)})
    assert best(ledger) == StateResult(1, 0, 5, 5, central=True)


def test_a_withheld_evaluation_has_no_result(ledger: Ledger) -> None:
    rounds(ledger, 0, [None])
    key = RoundKey(RUN, 0, EVALUATE, 0)
    ledger.rounds.open(key, asked=(ALICE,), base_state=0)
    ledger.rounds.close(key, "done")
    ledger.evaluations.add(RUN, 0, ALICE, {0: (0, 0)})
    assert ledger.evaluations.best(RUN) is None


# --- after a client was forgotten -------------------------------------------------------------------

FORK, NEXT = RunId("r20260104-000000-f0f0"), RunId("r20260105-000000-f0f0")


def forget(ledger: Ledger, first: int, source: RunId = RUN, fork: RunId = FORK) -> None:
    """Fork a run at its newest state, with other states from the first one on."""
    rows = ledger.states.all(source)
    with ledger.transaction():
        ledger.forks.begin(source, rows[-1].state, fork)
        states = [(r.state, digest(f"{fork} {r.state}"), r.parent) for r in rows[first:]]
        ledger.forks.leave_out(fork, BOB, states)


def test_a_state_that_was_computed_again_has_no_result(ledger: Ledger) -> None:
    """Neither in the fork that forgot a client, nor in a later fork of it."""
    rounds(ledger, 0, [3, 5])
    rounds(ledger, 1, [4, 9])
    ledger.tasks.close(RUN, 1)
    ledger.evaluations.add(RUN, 1, CENTRAL, {0: (8, 10)})
    forget(ledger, first=2)
    with ledger.transaction():
        ledger.forks.begin(FORK, 3, NEXT)
    for run in (FORK, NEXT):
        assert ledger.evaluations.of_states(run, 1) == []
        assert [r.state for r in ledger.evaluations.of_states(run, 0)] == [0, 1]
        assert ledger.evaluations.best(run) == StateResult(1, 0, 5, 10, central=True)
    assert best(ledger).state == 3, "the run that was forked keeps its own"


def test_clients_results_of_a_state_that_was_computed_again_do_not_count(ledger: Ledger) -> None:
    rounds(ledger, 0, [None, None])
    ledger.rounds.open(RoundKey(RUN, 0, EVALUATE, 0), asked=(ALICE,), base_state=1)
    ledger.evaluations.add(RUN, 0, ALICE, {0: (1, 4)})
    ledger.rounds.close(RoundKey(RUN, 0, EVALUATE, 0), "done")
    ledger.tasks.close(RUN, 0)
    forget(ledger, first=1)
    assert ledger.evaluations.totals(FORK, 0) == (1, 4)
    assert ledger.evaluations.best(FORK) is None


def test_a_test_in_the_fork_counts(ledger: Ledger, clock: Clock) -> None:
    rounds(ledger, 0, [3, 5])
    forget(ledger, first=0)
    assert ledger.evaluations.best(FORK) is None
    clock.now += 1
    ledger.tasks.close(FORK, 0)
    ledger.evaluations.add(FORK, 0, CENTRAL, {0: (2, 10)})
    assert ledger.evaluations.best(FORK) == StateResult(1, 0, 2, 10, central=True)


# --- late images ------------------------------------------------------------------------------------


def late(ledger: Ledger, clock: Clock, number: int) -> int:
    """Add a round of late images under task 0, later; return the state that it makes."""
    clock.now += 60
    state = ledger.states.newest(RUN).state + 1
    key = RoundKey(RUN, 0, LATE, number)
    ledger.rounds.open(key, asked=(ALICE,), base_state=state - 1)
    ledger.states.add(key, state, digest(f"state {state}"), None)
    ledger.rounds.close(key, "done", new_state=state)
    return state


def test_the_test_after_a_task_is_of_late_images_before_it_and_not_of_later_ones(
    ledger: Ledger, clock: Clock
) -> None:
    rounds(ledger, 0, [None])
    tested = late(ledger, clock, 0)
    ledger.evaluations.add(RUN, 0, CENTRAL, {0: (8, 10)})
    ledger.tasks.close(RUN, 0)
    late(ledger, clock, 1)
    assert [r.state for r in ledger.evaluations.of_states(RUN, 0)] == [tested]


@pytest.mark.parametrize(("back", "over"), [(0, False), (1, True), (2, True)])
def test_a_fork_before_late_images_of_a_task_leaves_something_of_it_behind(
    ledger: Ledger, clock: Clock, back: int, over: bool
) -> None:
    """Those that came after its end are no part of it."""
    rounds(ledger, 0, [None])
    late(ledger, clock, 0)
    ledger.evaluations.add(RUN, 0, CENTRAL, {0: (8, 10)})
    ledger.tasks.close(RUN, 0)
    late(ledger, clock, 1)
    with ledger.transaction():
        ledger.forks.begin(RUN, back, FORK)
    (task,) = ledger.tasks.all(FORK)
    assert (task.closed_at is not None) is over
    assert bool(ledger.evaluations.of_states(FORK, 0)) is over
