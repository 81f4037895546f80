"""The window follows the link: simulated links of all sorts, in simulated time."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.envelopes.window import (
    LOSS_TIMEOUT_S,
    MAX_SPAN_BYTES,
    MIN_WINDOW_BYTES,
    SPAN_S,
    WINDOW_S,
    Pace,
    share,
)

KB = 1000
MOST = 8 << 20
CHUNK = 32 << 10


class Link:
    """A receiver that asks by its pace over a link of some rate and delay; time is a number."""

    def __init__(self, rate, round_trip_s, most=MOST):
        self.pace = Pace(most)
        self.rate, self.round_trip_s = rate, round_trip_s
        self.now, self.free_at, self.got, self.seconds = 0.0, 0.0, 0, 0.0
        self.coming = []
        self.widest_s = 0.0  # longest time that what is in flight needs on this link
        self.longest_message_s = 0.0

    def ask(self):
        size = self.pace.free_bytes
        if not size:
            return
        self.pace.asked(size, self.now)
        self.widest_s = max(self.widest_s, self.pace.in_flight / self.rate)
        message = max(CHUNK, self.pace.span_bytes)
        self.longest_message_s = max(self.longest_message_s, message / self.rate)
        while size > 0:
            part = min(message, size)
            sent = max(self.now + self.round_trip_s, self.free_at) + part / self.rate
            self.free_at = sent
            heapq.heappush(self.coming, (sent, part))
            size -= part

    def move(self, total):
        """Receive so many bytes; return the seconds that it took."""
        began, end = self.now, self.got + total
        while self.got < end:
            self.ask()
            self.now, part = heapq.heappop(self.coming)
            self.got += part
            self.pace.arrived(part, self.now)
        return self.now - began


@pytest.mark.parametrize("rate", [5 * KB, 20 * KB, 100 * KB, 1000 * KB, 10**8])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.2, 4.0])
def test_what_is_in_flight_is_never_much_more_than_what_the_link_moves_in_the_window(
    rate, round_trip_s
):
    link = Link(rate, round_trip_s)
    link.move(40 * MIN_WINDOW_BYTES)
    # One window of the smallest size is sent to learn what the link is; then its rate counts.
    assert link.widest_s <= max(WINDOW_S * 1.1, MIN_WINDOW_BYTES / rate)
    assert link.longest_message_s <= max(SPAN_S * 1.1, CHUNK / rate)
    assert link.pace.window_bytes <= MOST


@pytest.mark.parametrize("rate", [20 * KB, 100 * KB, 1000 * KB, 10**7])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.2, 2.0])
def test_the_link_is_kept_busy(rate, round_trip_s):
    """After a start that doubles from round trip to round trip."""
    link = Link(rate, round_trip_s)
    link.move(MOST)
    most = MOST / 2 / round_trip_s  # half a window is what is asked for in a round trip
    total = max(MOST, int(20 * rate))
    assert link.move(total) <= 1.3 * total / min(rate, most)


def test_a_window_doubles_at_most_from_one_answer_to_the_next():
    pace = Pace(MOST)
    for step in range(3):
        size = pace.free_bytes
        assert size == MIN_WINDOW_BYTES << step
        pace.asked(size, now=float(step))
        pace.arrived(size, now=step + 1e-6)


def test_idle_time_and_small_questions_do_not_count_as_slowness():
    link = Link(1000 * KB, 0.1)
    link.move(4 * MOST)
    before = link.pace.window_bytes
    link.now += 3600
    link.pace.asked(100, link.now)
    link.pace.arrived(100, link.now + 5)
    assert link.pace.window_bytes == before


def test_a_few_bytes_that_came_with_their_header_say_nothing_of_the_link():
    pace = Pace(MOST)
    pace.asked(300, now=1.0, unasked=True)
    pace.arrived(300, now=1.0)
    assert (pace.rate, pace.span_bytes, pace.window_bytes) == (0, 0, MIN_WINDOW_BYTES)
    pace.asked(MIN_WINDOW_BYTES, now=2.0, unasked=True)
    pace.arrived(MIN_WINDOW_BYTES, now=3.0)
    assert pace.rate == MIN_WINDOW_BYTES


def test_a_link_that_has_become_slow_gets_less():
    link = Link(10**7, 0.01)
    link.move(4 * MOST)
    link.rate = 20 * KB
    link.move(2 * MOST)  # what was in flight; then it is known
    link.move(MOST // 2)
    assert link.pace.window_bytes <= 1.5 * WINDOW_S * link.rate
    assert link.pace.span_bytes <= max(CHUNK, 1.5 * SPAN_S * link.rate)


def test_messages_on_a_fast_link_are_large_and_a_window_has_several():
    link = Link(10**9, 0.001)
    link.move(4 * MOST)
    assert link.pace.span_bytes == MAX_SPAN_BYTES
    assert link.pace.window_bytes >= 4 * link.pace.span_bytes
    assert Pace(MOST).span_bytes == 0, "nothing is known: one chunk at a time"


def test_nothing_for_a_minute_while_something_is_in_flight_is_a_loss():
    pace = Pace(MOST)
    assert not pace.stalled(1e9), "nothing was asked"
    pace.asked(100, now=10.0)
    assert not pace.stalled(9.9 + LOSS_TIMEOUT_S)
    pace.arrived(10, now=30.0)
    pace.asked(100, now=50.0)  # a question is no answer
    assert not pace.stalled(29.9 + LOSS_TIMEOUT_S)
    assert pace.stalled(30.0 + LOSS_TIMEOUT_S)
    pace.begin_anew()
    assert not pace.stalled(1e9)
    assert (pace.in_flight, pace.free_bytes) == (0, MIN_WINDOW_BYTES)


def test_an_answer_that_is_waited_for_no_more_leaves_room():
    pace = Pace(MOST)
    pace.asked(MIN_WINDOW_BYTES, now=0.0)
    assert pace.free_bytes == 0
    pace.dropped(MIN_WINDOW_BYTES)
    assert pace.free_bytes == MIN_WINDOW_BYTES


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60), st.integers(1, MOST))
def test_whatever_happens_the_window_keeps_its_bounds(steps, most):
    pace, now = Pace(most), 0.0
    for ask, wait in steps:
        now += wait
        if ask:
            pace.asked(pace.free_bytes, now)
        else:
            pace.arrived(pace.in_flight // 2, now)
        assert 0 <= pace.in_flight <= max(MIN_WINDOW_BYTES, 2 * most)
        assert min(MIN_WINDOW_BYTES, most) <= pace.window_bytes <= most
        assert 0 <= pace.span_bytes <= MAX_SPAN_BYTES


def test_many_clients_share_what_the_memory_may_hold():
    total = 256 << 20
    assert share(MOST, 1, total) == MOST
    assert share(MOST, 0, total) == MOST
    assert share(MOST, 128, total) == 2 << 20
    assert share(MOST, 10**6, total) == MIN_WINDOW_BYTES
    assert share(1, 1, total) == MIN_WINDOW_BYTES
