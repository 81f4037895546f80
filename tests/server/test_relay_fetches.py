"""Which chunks a relay asks for: each once, at most the credit at a time."""

from fcil_server import relay_fetches
from fcil_server.relay_fetches import Fetches

HASHES = tuple(bytes([i]) * 32 for i in range(10))


def fetches(credit=4):
    made = Fetches(credit)
    made.learn("a", HASHES)
    return made


def test_several_lanes_cause_one_question(tmp_path):
    made = fetches()
    assert made.wait(1, "a", [0, 1]) == [0, 1]
    assert made.wait(2, "a", [0, 1, 2]) == [2]
    assert made.arrived("a", 0) == ({1, 2}, [])
    assert made.arrived("a", 2) == ({2}, [])
    assert made.arrived("a", 0) == (set(), [])


def test_no_more_is_in_flight_than_the_credit():
    made = fetches()
    assert made.wait(1, "a", range(10)) == [0, 1, 2, 3]
    assert made.arrived("a", 0) == ({1}, [])
    assert made.arrived("a", 1) == ({1}, [4, 5])
    assert made.wait(2, "a", range(10)) == []


def test_what_was_asked_for_and_nobody_wants_any_more_still_arrives():
    made = fetches()
    made.wait(1, "a", range(6))
    made.left(1)
    assert made.arrived("a", 0) == (set(), [])
    assert made.arrived("a", 1) == (set(), [])  # and nothing new is asked for
    assert made.wait(2, "a", [2, 3, 4]) == [4]


def test_a_part_that_is_refused_is_forgotten():
    made = fetches()
    made.wait(1, "a", [0])
    made.wait(2, "a", [1])
    assert made.refused("a") == {1, 2}
    assert made.hash_of("a", 0) is None
    assert made.refused("a") == set()


def test_a_hash_is_known_for_chunks_that_the_header_names():
    made = fetches()
    assert made.hash_of("a", 9) == HASHES[9]
    assert [made.hash_of("a", 10), made.hash_of("a", -1), made.hash_of("b", 0)] == [None] * 3


def test_old_headers_make_room_unless_somebody_waits(monkeypatch):
    monkeypatch.setattr(relay_fetches, "MAX_HASHES", 25)
    made = fetches()
    made.wait(1, "a", [0])
    made.learn("b", HASHES)
    made.learn("c", HASHES)
    assert made.hash_of("a", 0)
    assert made.hash_of("b", 0) is None
    assert made.hash_of("c", 0)
