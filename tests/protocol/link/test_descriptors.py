"""Which connection a descriptor belongs to, while news of ends come late and numbers are reused."""

from fcil_protocol.link.descriptors import Descriptors
from fcil_protocol.link.interface import Incoming


def on(conn: int) -> Incoming:
    return Incoming(b"route%d" % conn, conn, b"k" * 32, ())


def test_a_connection_is_found_by_its_number_until_its_end_is_known():
    found = Descriptors()
    found.spoke(7, on(1))
    found.spoke(8, on(2))
    assert found.of(1) == (7, on(1))
    found.end(7, 1)
    assert found.of(1) is None
    assert found.of(2) == (8, on(2))
    assert list(found.departures()) == [on(1)]
    assert found.of(1) is None


def test_a_number_that_is_used_again_belongs_to_the_newer_connection():
    found = Descriptors()
    found.spoke(7, on(1))
    assert found.spoke(7, on(5)) == on(1)
    assert found.of(1) is None
    assert found.of(5) == (7, on(5))
    assert found.is_left_behind(7, 1)
    found.end(7, 1)  # late news of the older one
    assert list(found.departures()) == []
    assert found.of(5) == (7, on(5))


def test_two_ends_of_one_number_that_were_not_told_yet_end_both_connections():
    found = Descriptors()
    found.spoke(7, on(1))
    found.end(7, 1)
    found.spoke(7, on(4))
    found.end(7, 4)
    assert found.is_over(7, 4)
    assert list(found.departures()) == [on(4)]
    assert not found.is_over(7, 9)


def test_an_older_end_does_not_hide_a_newer_one():
    found = Descriptors()
    found.end(7, 4)
    found.end(7, 1)
    assert found.is_over(7, 4)


def test_departures_come_in_the_order_of_their_news():
    found = Descriptors()
    for fd in (7, 8, 9):
        found.spoke(fd, on(fd))
    for fd in (8, 9, 7):
        found.end(fd, fd)
    assert [peer.conn for peer in found.departures()] == [8, 9, 7]
