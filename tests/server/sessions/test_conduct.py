"""Who is cut off for a while: whoever goes on after hundreds of refusals, and nobody else."""

import pytest

from fcil_protocol.ids import ClientId
from fcil_server.sessions.conduct import (
    ANNOUNCED,
    FORGIVEN_S,
    LONGEST_S,
    MOST,
    PAUSE_S,
    WINDOW_S,
    Conduct,
)

ANN, BOB = ClientId("a" * 26), ClientId("b" * 26)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def conduct(clock):
    return Conduct(clock)


def flood(conduct):
    """Send what is refused until the sender is cut off; return how many and for how long."""
    for number in range(1, 10 * MOST):
        if pause_s := conduct.count_needless(ANN):
            return number, pause_s
    raise AssertionError("it was never cut off")


def test_who_goes_on_after_hundreds_is_not_heard_for_a_minute(conduct, clock):
    assert flood(conduct) == (MOST + 1, PAUSE_S)
    assert conduct.remaining_s(ANN) == PAUSE_S
    assert conduct.remaining_s(BOB) == 0
    assert conduct.count_needless(ANN) == 0, "what comes meanwhile does not make it longer"
    clock.now += PAUSE_S
    assert conduct.remaining_s(ANN) == 0


def test_it_is_twice_as_long_each_time_and_an_hour_at_most(conduct, clock):
    pauses = []
    for _ in range(9):
        pauses.append(flood(conduct)[1])
        clock.now += pauses[-1] + 1
    assert pauses == [min(LONGEST_S, PAUSE_S * 2**n) for n in range(9)]
    clock.now += FORGIVEN_S
    assert flood(conduct)[1] == PAUSE_S


def test_ten_in_a_second_are_borne_for_ever(conduct, clock):
    for _ in range(20 * MOST):
        assert conduct.count_needless(ANN) == 0
        clock.now += WINDOW_S / MOST


def test_a_list_of_classes_every_two_seconds_is_borne_and_a_flood_of_them_is_not(conduct, clock):
    for _ in range(1000):
        assert conduct.count_needless(ANN, ANNOUNCED) == 0
        clock.now += 2.0
    sent = 1
    while not conduct.count_needless(BOB, ANNOUNCED):
        sent += 1
    assert sent == MOST // ANNOUNCED + 1
