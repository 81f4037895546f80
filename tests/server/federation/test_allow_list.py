"""Who passes the gate: members always, newcomers soon, former members now and then."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.link.interface import ComeAgain
from fcil_server.federation.allow_list import (
    FIRST_S,
    FORMER_BURST,
    FORMER_PER_S,
    MAX_SEEN,
    NEWCOMERS_BURST,
    NEWCOMERS_PER_S,
    USED_S,
    AllowList,
)

HOUR = 3600.0


class Gate:
    """A doorkeeper with a clock of its own; `knock` says what the gate answers."""

    def __init__(self):
        self.now = 0.0
        self.door = AllowList(clock=lambda: self.now)

    def knock(self, key):
        try:
            return 200 if self.door(key) else 400
        except ComeAgain:
            return 500


@pytest.fixture
def gate():
    return Gate()


def key(number):
    return number.to_bytes(32, "big")


def test_members_pass_always_and_strangers_never(gate):
    gate.door.admit(key(1))
    assert {gate.knock(key(1)) for _ in range(1000)} == {200}
    assert gate.knock(key(2)) == 400


@pytest.mark.parametrize(
    ("invite", "burst", "per_s"),
    [
        (lambda door, k: door.invite(k, HOUR), NEWCOMERS_BURST, NEWCOMERS_PER_S),
        (lambda door, k: door.explain(k), FORMER_BURST, FORMER_PER_S),
    ],
)
def test_guests_of_each_sort_are_few(gate, invite, burst, per_s):
    keys = [key(n) for n in range(burst + 5)]
    for one in keys:
        invite(gate.door, one)
    assert [gate.knock(k) for k in keys] == [200] * burst + [500] * 5
    gate.now += 3 / per_s
    assert [gate.knock(k) for k in keys[burst:]] == [200] * 3 + [500] * 2
    gate.now += HOUR / 2  # saved up, but never beyond the burst
    assert [gate.knock(k) for k in keys].count(200) == burst


def test_a_newcomer_waits_twice_as_long_each_time_and_leaves_room_for_the_others(gate):
    gate.door.invite(key(1), HOUR)
    gate.door.invite(key(2), HOUR)
    passed = []
    for _ in range(2000):
        if gate.knock(key(1)) == 200:
            passed.append(gate.now)
        gate.now += FIRST_S / 4
    waits = [after - before for before, after in zip(passed, passed[1:], strict=False)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60, 60]
    assert gate.knock(key(2)) == 200


def test_a_former_member_hears_why_at_once_and_then_once_a_minute(gate):
    gate.door.explain(key(1))
    passed = []
    for _ in range(300):
        if gate.knock(key(1)) == 200:
            passed.append(gate.now)
        gate.now += 1
    assert passed == [0, 60, 120, 180, 240]


def test_a_ticket_that_is_over_counts_as_a_former_members(gate):
    gate.door.invite(key(1), 10.0)
    gate.now = 11.0
    fill_the_corner(gate)
    assert gate.knock(key(1)) == 500


def test_who_has_just_used_its_ticket_may_come_for_an_answer_that_was_lost(gate):
    gate.door.invite(key(1), HOUR)
    assert gate.knock(key(1)) == 200
    gate.door.used(key(1))
    gate.now += FIRST_S
    fill_the_corner(gate)
    assert gate.knock(key(1)) == 200
    gate.now += USED_S
    fill_the_corner(gate)
    assert gate.knock(key(1)) == 500


def fill_the_corner(gate):
    """Use up what former members may have at this moment."""
    number = 10_000
    for number in range(10_000, 10_000 + FORMER_BURST):
        gate.door.explain(key(number))
        gate.knock(key(number))


@settings(max_examples=60)
@given(
    hostile=st.integers(0, 200),
    rhythm=st.lists(st.tuples(st.integers(0, 199), st.floats(0, 30)), max_size=80),
)
def test_no_number_of_former_members_keeps_a_newcomer_out(hostile, rhythm):
    """The newcomer's first handshake passes, at any moment, whatever those did before."""
    gate = Gate()
    for number in range(hostile):
        gate.door.explain(key(number))
    for number, pause in rhythm:
        for other in range(hostile):
            gate.knock(key((other + number) % max(1, hostile)))
        gate.now += pause
    gate.door.invite(key(999), HOUR)
    for other in range(hostile):
        gate.knock(key(other))
    assert gate.knock(key(999)) == 200


@pytest.mark.parametrize("hostile", [3, 10, 20])
def test_holders_of_unused_tickets_hold_a_newcomer_up_for_a_minute_at_most(hostile):
    """They knock ten times a second, it every three; the client tries for a minute."""
    gate = Gate()
    for number in range(hostile):
        gate.door.invite(key(number), HOUR)
    for _ in range(50):  # as when they have been at it for a while, and the bucket is empty
        for number in range(hostile):
            gate.knock(key(number))
        gate.now += 0.1
    gate.door.invite(key(999), HOUR)
    began = gate.now
    while gate.knock(key(999)) != 200:
        for _ in range(30):
            gate.now += 0.1
            for number in range(hostile):
                gate.knock(key(number))
        assert gate.now - began <= 60
    gate.door.used(key(999))


def test_more_keys_than_are_remembered_do_not_fill_the_memory(gate):
    for number in range(MAX_SEEN + 50):
        gate.door.replace([], {key(number): HOUR}, [])
        gate.now += 1 / NEWCOMERS_PER_S
        assert gate.knock(key(number)) == 200
    assert len(gate.door._room.seen) <= MAX_SEEN


def test_a_key_is_a_members_or_a_guests_never_both(gate):
    gate.door.admit(key(1))
    gate.door.invite(key(1), HOUR)
    assert not gate.door.is_member(key(1))
    gate.door.admit(key(1))
    assert gate.door.is_member(key(1))
    gate.door.explain(key(1))
    assert not gate.door.is_member(key(1))
    gate.door.forget(key(1))
    assert gate.knock(key(1)) == 400
