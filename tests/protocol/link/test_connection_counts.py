"""Counts of connections that begin, speak, end, and leave their descriptor to others."""

import os
import socket
import sys

import pytest

from fcil_protocol.link import connection_counts
from fcil_protocol.link.backlog import UNSPOKEN_BYTES
from fcil_protocol.link.connection_counts import SILENT, ConnectionCounts

ROOM = 1 << 20  # bytes that may lie unread
HELLO = 64 + 202  # bytes of a greeting and of CURVE's first command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its counts")


class Wire:
    """Both ends of one TCP connection; `fd` is the accepting end's descriptor."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.near = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()
        self.fd = self.far.fileno()

    def up(self, size):
        self.near.sendall(bytes(size))
        while size:
            size -= len(self.far.recv(size))

    def close(self):
        self.far.close()
        self.near.close()


@pytest.fixture
def counts():
    counts = ConnectionCounts()
    yield counts
    counts.close()


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.close()


def taken(counts):
    """Return all the pieces as one; no connection is in two of them here."""
    return {conn: grown for piece in counts.take() for conn, grown in piece.items()}


def test_thousands_of_connections_are_read_a_few_at_a_time(counts, monkeypatch):
    monkeypatch.setattr(connection_counts, "STEP", 2)
    wires = [Wire() for _ in range(5)]
    for number, wire in enumerate(wires, start=1):
        counts.began(wire.fd)
        wire.up(number)
        counts.spoke(wire.fd, number, ROOM)
    pieces = counts.take()
    assert next(pieces) == {}, "no connection has ended"
    assert {c: t.received for c, t in next(pieces).items()} == {1: 1, 2: 2}
    counts.ended(wires[2].fd)  # meanwhile: it is counted as an end
    assert [{c: t.received for c, t in piece.items()} for piece in pieces] == [{4: 4}, {5: 5}]
    assert {c: t.received for c, t in taken(counts).items()} == {3: 3}
    for wire in wires:
        wire.close()


def test_growth_is_told_once_and_under_the_number_that_the_connection_gets(counts, wire):
    counts.began(wire.fd)
    wire.up(100)
    counts.spoke(wire.fd, 7, ROOM)
    wire.up(11)
    assert {c: t.received for c, t in taken(counts).items()} == {7: 111}
    assert taken(counts) == {}
    wire.up(5)
    assert taken(counts)[7].received == 5


def test_what_comes_before_the_first_word_waits_for_the_number(counts, wire):
    counts.began(wire.fd)
    wire.up(64)
    assert taken(counts) == {}
    counts.spoke(wire.fd, 3, ROOM)
    wire.up(1)
    assert {c: t.received for c, t in taken(counts).items()} == {3: 65}


def test_a_connection_without_a_word_is_counted_as_silent_at_its_end(counts, wire):
    counts.began(wire.fd)
    wire.up(64)
    assert taken(counts) == {}
    wire.far.close()
    counts.ended(wire.fd)
    assert {c: t.received for c, t in taken(counts).items()} == {SILENT: 64}


def test_what_came_before_an_end_is_not_lost(counts, wire):
    counts.began(wire.fd)
    counts.spoke(wire.fd, 3, ROOM)
    wire.up(40)
    wire.far.close()
    counts.ended(wire.fd)
    assert taken(counts)[3].received == 40
    assert taken(counts) == {}


def test_an_ended_connection_can_really_end(counts, wire):
    counts.began(wire.fd)
    wire.far.close()
    counts.ended(wire.fd)
    wire.near.settimeout(5)
    assert wire.near.recv(1) == b""


def test_two_connections_on_one_descriptor_are_two(counts):
    first, second = Wire(), Wire()
    counts.began(first.fd)
    counts.spoke(first.fd, 1, ROOM)
    first.up(10)
    first.close()
    os.dup2(second.fd, first.fd)  # the number is used again
    counts.ended(first.fd)
    counts.began(first.fd)
    counts.spoke(first.fd, 2, ROOM)
    second.up(20)
    assert {c: t.received for c, t in taken(counts).items()} == {1: 10, 2: 20}
    os.close(first.fd)
    second.close()


def test_late_news_of_a_dead_connection_do_not_count_its_successor_twice(counts, wire):
    wire.up(30)  # the successor lives on this descriptor already ...
    counts.began(wire.fd)  # ... when the dead one's beginning is told,
    counts.ended(wire.fd)  # and its end,
    counts.began(wire.fd)  # and only then its own beginning
    counts.spoke(wire.fd, 9, ROOM)
    wire.up(4)
    assert sum(t.received for t in taken(counts).values()) == 34


def test_a_descriptor_that_is_no_connection_is_left_alone(counts, tmp_path):
    with (tmp_path / "file").open("w") as file:
        counts.began(file.fileno())
        counts.spoke(file.fileno(), 1, ROOM)
        counts.ended(file.fileno())
    assert taken(counts) == {}


def test_who_is_beyond_its_allowance_is_cut_once_and_told_with_its_number(counts, wire):
    counts.began(wire.fd)
    counts.spoke(wire.fd, 7, 100)
    wire.up(150)
    counts.delivered(wire.fd, [60])
    assert counts.cut_floods(0.0) == []
    wire.up(20)
    assert counts.cut_floods(0.0) == [(7, 110)]
    wire.near.settimeout(5)
    assert wire.near.recv(1) == b""
    assert counts.cut_floods(0.0) == []


def test_who_has_not_spoken_may_bring_one_first_message(counts, wire):
    counts.began(wire.fd)
    wire.up(UNSPOKEN_BYTES)
    assert counts.cut_floods(0.0) == []
    wire.up(1)
    assert counts.cut_floods(0.0) == [(SILENT, UNSPOKEN_BYTES + 1)]


def ended_by_the_server(wire):
    """Return True if the far end has shut the connection down."""
    wire.near.settimeout(60)
    return wire.near.recv(1) == b""


def is_open(wire):
    wire.near.setblocking(False)
    try:
        return bool(wire.near.recv(1))
    except BlockingIOError:
        return True


@pytest.fixture
def four():
    wires = [Wire() for _ in range(4)]
    yield wires
    for wire in wires:
        wire.close()


def test_of_too_many_connections_the_oldest_silent_one_is_cut(four):
    counts, (member, first, second, third) = ConnectionCounts(most=2), four
    assert not counts.began(member.fd)
    counts.spoke(member.fd, 1, ROOM)
    assert not counts.began(first.fd)
    assert counts.began(second.fd)
    assert ended_by_the_server(first)
    assert counts.began(third.fd)  # before the news of the end
    assert ended_by_the_server(second)
    counts.ended(first.fd)
    counts.ended(second.fd)
    assert len(counts) == 2
    assert is_open(member)
    assert is_open(third)
    counts.close()


def test_of_too_many_that_have_spoken_the_newcomer_is_cut(four):
    counts, (member, newcomer, *_) = ConnectionCounts(most=1), four
    counts.began(member.fd)
    counts.spoke(member.fd, 1, ROOM)
    assert counts.began(newcomer.fd)
    assert ended_by_the_server(newcomer)
    assert is_open(member)
    counts.close()


def test_one_whose_first_message_may_wait_to_be_read_is_passed_over(four):
    counts, (stranger, member, newcomer, another) = ConnectionCounts(most=2), four
    stranger.up(HELLO)
    member.up(HELLO + 1)
    counts.began(member.fd)
    counts.began(stranger.fd)
    assert counts.began(newcomer.fd)
    assert ended_by_the_server(stranger)
    assert counts.began(another.fd)
    assert ended_by_the_server(newcomer)
    assert is_open(member)
    counts.close()


def test_of_strangers_that_send_as_much_as_members_the_oldest_is_cut(four):
    counts, (first, second, third, _) = ConnectionCounts(most=2), four
    for wire in (first, second, third):
        wire.up(HELLO + 1)
    counts.began(first.fd)
    counts.began(second.fd)
    assert counts.began(third.fd)
    assert ended_by_the_server(first)
    assert is_open(second)
    counts.close()


def test_only_the_oldest_are_passed_over(four, monkeypatch):
    monkeypatch.setattr(connection_counts, "_LOOKS", 2)
    counts, (first, second, third, silent) = ConnectionCounts(most=3), four
    for wire in (first, second, third):
        wire.up(HELLO + 1)
    for wire in four:
        crowded = counts.began(wire.fd)
    assert crowded
    assert ended_by_the_server(first)
    assert is_open(silent)
    counts.close()


def test_one_that_has_ended_leaves_its_place(four):
    counts, (first, second, third, _) = ConnectionCounts(most=2), four
    counts.began(first.fd)
    counts.began(second.fd)
    counts.ended(first.fd)
    assert not counts.began(third.fd)
    assert is_open(second)
    counts.close()
