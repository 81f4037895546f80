"""Chunks on request: the receiver never has more in flight than its window, and gets all."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, Sealed, seal
from fcil_protocol.envelopes.transfer import MAX_SPOILED, Inflow, Receiving, runs, unasked
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S, MIN_WINDOW_BYTES
from fcil_protocol.errors import WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.keys import PrivateKeys

KEYS = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
CHUNK = 16 << 10
CHUNKS = 21
CORE = Core(
    protocol=PROTOCOL_VERSION,
    federation=FederationId("0123456789abcdef" * 2),
    run="r20260102-030405-0a0b",
    direction="update",
    sender="a" * 26,
    sender_key=KEYS.public.fingerprint,
    recipient="server",
    method="pilora",
    schema="",
    task=0,
    round=0,
    kind="train",
    base=0,
)
PLAIN = hashlib.shake_256(b"transfer").digest(CHUNK * (CHUNKS - 1))
SEALED: Sealed = seal(PLAIN, CORE, KEYS, chunk_bytes=CHUNK)[0]


DIGEST = SEALED.parsed.update_id


def receiving(path: Path | None = None, sealed: Sealed = SEALED) -> Receiving:
    assembly = Assembly(sealed.parsed, path=path)
    return Receiving(sealed.parsed, sealed.header, sealed.signature, b"wrap", assembly)


def inflow(chunks: int, *sealed: Sealed, unasked: int = 0) -> Inflow:
    """Return an inflow whose window has so many chunks, with these envelopes under way."""
    made = Inflow(chunks * CHUNK)
    for one in sealed or (SEALED,):
        made.begin(receiving(sealed=one), 0.0, unasked=unasked)
    return made


def wanted(made: Inflow, now: float = 0.0) -> list[int]:
    return [index for want in made.wants(now) for index in want.chunks]


def deliver(made: Inflow, index: int, now: float = 0.0) -> None:
    assert made.put(DIGEST, index, bytes(SEALED.chunk(index)), now)


def another(number: int) -> Sealed:
    return seal(b"%d" % number * 3 * CHUNK, CORE, KEYS, chunk_bytes=CHUNK)[0]


def test_the_sample_has_several_times_the_window() -> None:
    assert len(SEALED.parsed.hashes) == CHUNKS


@settings(max_examples=60)
@given(st.integers(1, 64), st.integers(0, 8), st.randoms(use_true_random=False))
def test_everything_arrives_once_within_the_window_in_any_order(
    chunks: int, first: int, draw: random.Random
) -> None:
    """The sender answers what was asked, in any order; nothing is asked for twice."""
    made = inflow(chunks, unasked=first)
    flight = list(range(first))
    asked = list(flight)
    while True:
        new = wanted(made)
        asked += new
        flight += new
        assert len(flight) <= max(chunks, first)
        if not flight:
            break
        deliver(made, flight.pop(draw.randrange(len(flight))))
    assert made.under_way[DIGEST].complete
    assert sorted(asked) == list(range(CHUNKS))
    assert made.pace.in_flight == 0


def test_it_asks_again_when_half_of_what_was_asked_has_come() -> None:
    made = inflow(8)
    assert wanted(made) == list(range(8))
    for index in range(3):
        deliver(made, index)
        assert wanted(made) == []
    deliver(made, 3)
    assert wanted(made) == [8, 9, 10, 11]


def test_what_a_sender_sends_unasked_is_not_asked_for() -> None:
    made = inflow(8, unasked=8)
    assert wanted(made) == []
    for index in range(4):
        deliver(made, index)
    assert wanted(made) == [8, 9, 10, 11]


def test_a_sender_sends_few_chunks_unasked() -> None:
    assert unasked(SEALED.parsed) * CHUNK == 128 << 10
    large = seal(bytes(9 << 20), CORE, KEYS, chunk_bytes=1 << 20)[0]
    assert unasked(large.parsed) == 1
    small = seal(b"x", CORE, KEYS, chunk_bytes=CHUNK)[0]
    assert unasked(small.parsed) == 1


def test_envelopes_of_one_connection_share_its_window_in_order() -> None:
    first, second = another(1), another(2)
    made = inflow(6, first, second)
    assert [(w.digest, w.chunks) for w in made.wants(0.0)] == [
        (first.parsed.update_id, [0, 1, 2, 3]),
        (second.parsed.update_id, [0, 1]),
    ]
    made.end(first.parsed.update_id)
    assert [(w.digest, w.chunks) for w in made.wants(0.0)] == [(second.parsed.update_id, [2, 3])]
    assert made.end("of none") is None


def test_a_window_smaller_than_a_chunk_brings_one_at_a_time() -> None:
    made = Inflow(1)
    made.begin(receiving(), 0.0)
    assert wanted(made) == [0]
    assert wanted(made) == []
    deliver(made, 0)
    assert wanted(made) == [1]


def test_a_link_that_brings_much_is_asked_for_more_in_larger_messages() -> None:
    large = seal(bytes(2 << 20), CORE, KEYS, chunk_bytes=CHUNK)[0]
    made = Inflow(1 << 20)
    made.begin(receiving(sealed=large), 0.0)
    [first] = made.wants(0.0)
    assert (len(first.chunks) * CHUNK, first.span) == (MIN_WINDOW_BYTES, 1)
    for index in first.chunks:
        made.put(large.parsed.update_id, index, bytes(large.chunk(index)), 0.01)
    [second] = made.wants(0.01)
    assert (len(second.chunks) * CHUNK, second.span) == (2 * MIN_WINDOW_BYTES, 4)


def test_a_message_may_carry_several_chunks() -> None:
    made = inflow(8)
    wanted(made)
    made.put(DIGEST, 0, SEALED.body[: 5 * CHUNK], 0.0)
    assert made.pace.in_flight == 3 * CHUNK
    assert wanted(made) == [8, 9, 10, 11, 12]


def test_after_a_lost_connection_what_was_in_flight_is_asked_for_again() -> None:
    made = inflow(4)
    assert wanted(made) == [0, 1, 2, 3]
    deliver(made, 1)
    made.lose()
    assert wanted(made) == [0, 2, 3, 4]


def test_what_never_comes_on_a_connection_that_lives_is_asked_for_again() -> None:
    made = inflow(4)
    wanted(made)
    deliver(made, 1, now=5.0)
    assert not made.revive(LOSS_TIMEOUT_S)
    assert wanted(made, LOSS_TIMEOUT_S) == []
    assert made.revive(LOSS_TIMEOUT_S + 5)
    assert wanted(made, LOSS_TIMEOUT_S + 5) == [0, 2, 3, 4]


def test_an_interrupted_transfer_goes_on_at_the_first_missing_chunk(tmp_path: Path) -> None:
    """The file remembers; what the sender sends unasked is not waited for twice."""
    path = tmp_path / "incoming"
    first = receiving(path)
    for index in (0, 1, 2, 3, 4, 7):
        first.put(index, bytes(SEALED.chunk(index)))
    made = Inflow(4 * CHUNK)
    made.begin(receiving(path), 0.0, unasked=4)
    assert wanted(made) == [5, 6, 8, 9]


def test_a_chunk_twice_is_no_news_and_costs_no_window() -> None:
    made = inflow(2)
    assert wanted(made) == [0, 1]
    deliver(made, 0)
    deliver(made, 0)
    assert made.pace.in_flight == CHUNK
    assert wanted(made) == [2]


def test_a_chunk_of_no_envelope_under_way_is_let_pass() -> None:
    assert inflow(2).put("0" * 64, 0, b"x", 0.0) is None


def test_an_altered_chunk_is_refused_and_asked_for_again_a_few_times() -> None:
    made = inflow(2)
    changed = bytearray(SEALED.body[: 2 * CHUNK])
    changed[CHUNK + 5] ^= 1
    assert wanted(made) == [0, 1]
    with pytest.raises(WireError, match="chunk 1 .* does not match its hash"):
        made.put(DIGEST, 0, bytes(changed), 0.0)
    for _ in range(MAX_SPOILED - 1):
        assert wanted(made)[0] == 1, "the one before it was good"
        with pytest.raises(WireError):
            made.put(DIGEST, 1, bytes(CHUNK), 0.0)
        assert made.under_way[DIGEST].retries
    assert wanted(made)[0] == 1
    with pytest.raises(WireError):
        made.put(DIGEST, 1, bytes(CHUNK), 0.0)
    assert not made.under_way[DIGEST].retries
    assert 1 not in wanted(made), "not at once"
    deliver(made, 1)
    assert made.under_way[DIGEST].assembly.has(1)


@pytest.mark.parametrize("index", [-1, CHUNKS, 2**40])
def test_a_chunk_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(WireError, match=f"0 to {CHUNKS - 1}, got {index}"):
        inflow(2).put(DIGEST, index, b"x", 0.0)


def test_a_complete_envelope_keeps_what_belongs_to_it() -> None:
    made = inflow(64)
    while missing := wanted(made):
        for index in missing:
            deliver(made, index)
    side = made.end(DIGEST)
    assert side is not None
    assert side.complete
    assert b"".join(side.assembly.chunks()) == SEALED.body
    assert (side.header_bytes, side.signature, side.wrap) == (
        SEALED.header,
        SEALED.signature,
        b"wrap",
    )


@given(st.lists(st.integers(0, CHUNKS - 1), max_size=40), st.integers(1, 100))
def test_messages_carry_all_chunks_in_order_and_none_is_too_long(
    indices: list[int], span: int
) -> None:
    found = list(runs(SEALED.parsed, indices, span))
    assert [i for run in found for i in run] == indices
    assert all(1 <= len(run) <= min(span, 16) for run in found)
    assert list(runs(SEALED.parsed, range(6), 4)) == [range(4), range(4, 6)]
