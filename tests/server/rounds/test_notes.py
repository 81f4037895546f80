"""What the operator reads about rounds and tasks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sample_run
from fcil_adapters.contract import TaskInfo
from fcil_adapters.masks.exchanges import KEYS, SHARES, UNMASK
from fcil_protocol.ids import RoundKey
from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds import notes
from fcil_server.rounds.notes import describe_pace, describe_task_end
from fcil_server.rounds.schedule import Step
from sample_run import ALICE, BOB, RUN, digest


@pytest.mark.parametrize(
    ("step", "took_s", "said"),
    [
        (Step("train", 0, 5), 22.0, "took 22.0 s; the other 4 together take about 1 min 28 s"),
        (Step("train", 0, 2), 90.0, "took 1 min 30 s; the other one takes about 1 min 30 s"),
        (
            Step("train", 0, 10),
            600.0,
            "took 10 min 0 s; the other 9 together take about 1 h 30 min",
        ),
    ],
)
def test_the_first_round_of_a_kind_says_how_long_the_others_take(
    step: Step, took_s: float, said: str
) -> None:
    assert describe_pace(3, step, took_s).startswith(f"task 3 train round 0 {said}")


@pytest.mark.parametrize(
    ("step", "took_s"),
    [
        (Step("train", 1, 5), 22.0),
        (Step("evaluate", 0, 1), 600.0),
        (Step("train", 0, 5), 0.7),
        (Step("train", 0, 5), 0.0),
    ],
    ids=["a later round", "the only one", "soon over", "a clock that was set back"],
)
def test_nothing_is_said_where_it_helps_nobody(step: Step, took_s: float) -> None:
    assert describe_pace(0, step, took_s) == ""


TASK, REST = TaskInfo(1, (2,), (0, 1)), "of the 3 classes so far are right"


@pytest.mark.parametrize(
    ("tests", "listed", "said"),
    [
        ({ALICE: {0: (4, 4), 2: (1, 3)}, BOB: {1: (1, 1)}, CENTRAL: {0: (0, 9)}}, 2,
         f": 75.0% of 8 test images {REST}"),
        ({CENTRAL: {0: (1, 2)}}, 2, f": 50.0% of 2 test images {REST}"),
        ({}, 2, ""),
        ({}, 0, "; for more: fcil-server report"),
    ],
    ids=["clients", "the server's folder", "no test", "a run without an end"],
)  # fmt: skip
def test_a_learned_task_says_how_much_is_right_of_all_classes_so_far(
    tmp_path, tests, listed, said
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
        for client, counts in tests.items():
            ledger.evaluations.add(RUN, 1, client, counts)
        context = SimpleNamespace(
            run=RUN,
            ledger=SimpleNamespace(
                evaluations=ledger.evaluations,
                rounds=SimpleNamespace(
                    was_learned=lambda run, task, late=False, without=(): (
                        (run, task, late) == (RUN, 1, False)
                    )
                ),
            ),
            masked_kinds=frozenset(),
            classes=SimpleNamespace(listed_tasks=lambda: listed),
        )
        assert describe_task_end(context, TASK) == ("info", f"task 1 is learned{said}")
        level, text = describe_task_end(context, TaskInfo(2, (3,), (0, 1, 2)))
    assert (level, "nothing was learned" in text) == ("warning", True)


def test_a_masked_task_is_learned_once_its_sum_is_opened(tmp_path) -> None:
    """The keys, the shares and the sealed sum make states, too, in which nothing is learned."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
        ledger.tasks.open(RUN, 0, [])
        context = SimpleNamespace(
            run=RUN,
            ledger=ledger,
            masked_kinds=frozenset({"train"}),
            classes=SimpleNamespace(listed_tasks=lambda: 2),
        )
        for number, kind in enumerate((KEYS, SHARES, "train", UNMASK)):
            level, text = describe_task_end(context, TaskInfo(0, (3,), ()))
            assert (level, "nothing was learned" in text) == ("warning", True), kind
            key = RoundKey(RUN, 0, kind, 0)
            ledger.rounds.open(key, asked=[ALICE], base_state=number)
            with ledger.transaction():
                ledger.states.add(key, number + 1, digest("s"), None)
                ledger.rounds.close(key, "done", new_state=number + 1)
        said = describe_task_end(context, TaskInfo(0, (3,), ()))
        assert said == ("info", "task 0 is learned")


def test_of_thousands_of_clients_only_those_that_are_named_are_looked_up() -> None:
    looked: list[str] = []
    context = SimpleNamespace(name_of=lambda client: looked.append(client) or client)
    clients = [f"c{n}" for n in range(3000)]
    text = notes._names(context, iter(clients))
    assert looked == clients[: notes.NAMED]
    assert text.endswith(f"and {3000 - notes.NAMED} more")
