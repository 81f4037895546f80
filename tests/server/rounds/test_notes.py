"""What the operator reads about the length of rounds."""

from __future__ import annotations

import pytest

from fcil_server.rounds.notes import describe_pace
from fcil_server.rounds.schedule import Step


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
