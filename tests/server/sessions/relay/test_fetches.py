"""Which chunks a relay asks for: each once, at most a window at a time."""

from types import SimpleNamespace

from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S
from fcil_server.sessions.relay import fetches as relay_fetches
from fcil_server.sessions.relay.fetches import Fetches

CHUNK = 16_384
A, B, C = "a" * 64, "b" * 64, "c" * 64


def header(digest, chunks=10):
    return SimpleNamespace(
        update_id=digest, hashes=(b"h",) * chunks, chunk_bytes=CHUNK, chunk_size=lambda _: CHUNK
    )


def fetches(chunks_in_window=4):
    made = Fetches(chunks_in_window * CHUNK)
    made.learn(header(A))
    return made


def asked(made, now=0.0):
    return {want.digest: want.chunks for want in made.wants(now)}


def test_several_lanes_cause_one_question():
    made = fetches()
    made.wait(1, A, [0, 1])
    assert asked(made) == {A: [0, 1]}
    made.wait(2, A, [0, 1, 2])
    assert asked(made) == {A: [2]}
    assert made.arrived(A, [0], 0.0) == {1: [0], 2: [0]}
    assert made.arrived(A, [2], 0.0) == {2: [2]}
    assert made.arrived(A, [0], 0.0) == {}


def test_of_a_message_with_several_chunks_each_lane_gets_those_it_waits_for():
    made = fetches()
    made.wait(1, A, [0, 1])
    made.wait(2, A, [1, 2])
    assert asked(made) == {A: [0, 1, 2]}
    assert made.arrived(A, [0, 1, 2], 0.0) == {1: [0, 1], 2: [1, 2]}
    assert made.pace.in_flight == 0


def test_no_more_is_in_flight_than_the_window():
    made = fetches()
    made.wait(1, A, range(10))
    assert asked(made) == {A: [0, 1, 2, 3]}
    made.arrived(A, [0], 0.0)
    assert asked(made) == {}
    made.arrived(A, [1], 0.0)
    assert asked(made) == {A: [4, 5]}
    made.wait(2, A, range(10))
    assert asked(made) == {}


def test_parts_share_the_window_of_the_uplink():
    made = fetches()
    made.learn(header(B))
    made.wait(1, A, [0, 1])
    made.wait(2, B, range(10))
    assert asked(made) == {A: [0, 1], B: [0, 1]}


def test_a_window_smaller_than_a_chunk_brings_one_at_a_time():
    made = Fetches(1)
    made.learn(header(A))
    made.wait(1, A, [3, 4])
    assert asked(made) == {A: [3]}
    assert asked(made) == {}
    made.arrived(A, [3], 1.0)
    assert asked(made) == {A: [4]}


def test_what_was_asked_for_and_nobody_wants_any_more_still_arrives():
    made = fetches()
    made.wait(1, A, range(6))
    asked(made)
    made.left(1)
    assert made.arrived(A, [0, 1], 0.0) == {}
    assert asked(made) == {}, "and nothing new is asked for"
    made.wait(2, A, [2, 3, 4])
    assert asked(made) == {A: [4]}


def test_a_part_that_is_refused_is_forgotten_and_leaves_room():
    made = fetches()
    made.wait(1, A, [0, 2, 3])
    made.wait(2, A, [1])
    asked(made)
    assert made.refused(A) == {1, 2}
    assert made.header_of(A) is None
    assert made.refused(A) == set()
    assert made.pace.in_flight == 0


def test_what_never_comes_is_asked_for_again():
    made = fetches()
    made.wait(1, A, [0, 1])
    assert asked(made) == {A: [0, 1]}
    assert not made.revive(LOSS_TIMEOUT_S - 1)
    assert made.revive(LOSS_TIMEOUT_S)
    assert asked(made, LOSS_TIMEOUT_S) == {A: [0, 1]}
    made.arrived(A, [0, 1], LOSS_TIMEOUT_S + 1)
    assert not made.revive(1e9), "nothing is in flight"


def test_old_headers_make_room_unless_somebody_waits(monkeypatch):
    monkeypatch.setattr(relay_fetches, "MAX_HASHES", 25)
    made = fetches()
    made.wait(1, A, [0])
    made.learn(header(B))
    made.learn(header(C))
    assert made.header_of(A)
    assert made.header_of(B) is None
    assert made.header_of(C)


def test_many_small_parts_are_forgotten_too(monkeypatch):
    monkeypatch.setattr(relay_fetches, "MAX_PARTS", 3)
    made = fetches()
    made.wait(1, A, [0])
    small = [f"{number:064d}" for number in range(20)]
    for digest in small:
        made.learn(header(digest, 1))
    assert [d for d in [A, *small] if made.header_of(d)] == [A, *small[-2:]]
    assert asked(made) == {A: [0]}
    made.left(1)
    made.arrived(A, [0], 0.0)
    made.learn(header(B, 1))
    assert made.header_of(A) is None
