"""Chunks on request: the receiver never has more in flight than its credit, and gets all."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.assembly import Assembly
from fcil_protocol.envelope import Core, Sealed, seal
from fcil_protocol.errors import WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.keys import PrivateKeys
from fcil_protocol.transfer import Receiving

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


def receiving(credit: int, path: Path | None = None) -> Receiving:
    header = SEALED.parsed
    assembly = Assembly(header, path=path)
    return Receiving(header, SEALED.header, SEALED.signature, b"wrap", assembly, credit)


def deliver(side: Receiving, index: int) -> bool:
    return side.put(index, bytes(SEALED.chunk(index)))


def test_the_sample_has_several_times_the_credit() -> None:
    assert len(SEALED.parsed.hashes) == CHUNKS


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.booleans(), st.randoms(use_true_random=False))
def test_everything_arrives_once_within_the_credit_in_any_order(
    credit: int, unasked: bool, draw: random.Random
) -> None:
    """The sender answers what was asked, in any order; nothing is asked for twice."""
    side = receiving(credit)
    flight = list(range(min(credit, CHUNKS))) if unasked else []
    if unasked:
        side.expect_first()
    asked = list(flight)
    while True:
        wanted = side.want()
        assert wanted == sorted(wanted)
        asked += wanted
        flight += wanted
        assert len(flight) <= credit
        if not flight:
            break
        assert deliver(side, flight.pop(draw.randrange(len(flight))))
    assert side.complete
    assert sorted(asked) == list(range(CHUNKS))
    assert side.want() == []


def test_it_asks_again_when_half_of_what_was_asked_has_come() -> None:
    side = receiving(8)
    assert side.want() == list(range(8))
    for index in range(3):
        deliver(side, index)
        assert side.want() == []
    deliver(side, 3)
    assert side.want() == [8, 9, 10, 11]


def test_what_a_sender_sends_unasked_is_not_asked_for() -> None:
    side = receiving(8)
    side.expect_first()
    assert side.want() == []
    for index in range(4):
        deliver(side, index)
    assert side.want() == [8, 9, 10, 11]


def test_after_a_new_connection_what_was_in_flight_is_asked_for_again() -> None:
    side = receiving(4)
    assert side.want() == [0, 1, 2, 3]
    deliver(side, 1)
    side.forget_asked()
    assert side.want() == [0, 2, 3, 4]


def test_an_interrupted_transfer_goes_on_at_the_first_missing_chunk(tmp_path: Path) -> None:
    """The file remembers; what the sender sends unasked from the start is not waited for."""
    path = tmp_path / "incoming"
    first = receiving(4, path)
    for index in (0, 1, 2, 3, 4, 7):
        deliver(first, index)
    again = receiving(4, path)
    again.expect_first()
    assert again.want() == [5, 6, 8, 9]


def test_a_chunk_twice_is_no_news_and_costs_no_credit() -> None:
    side = receiving(2)
    assert side.want() == [0, 1]
    assert deliver(side, 0)
    assert not deliver(side, 0)
    assert side.want() == [2]


def test_an_altered_chunk_is_refused_and_stays_asked_for() -> None:
    side = receiving(2)
    side.want()
    changed = bytearray(SEALED.chunk(0))
    changed[5] ^= 1
    with pytest.raises(WireError, match="does not match its hash"):
        side.put(0, bytes(changed))
    assert deliver(side, 0)


@pytest.mark.parametrize("index", [-1, CHUNKS, 2**40])
def test_a_chunk_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(WireError, match=f"0 to {CHUNKS - 1}, got {index}"):
        receiving(2).put(index, b"x")


def test_a_complete_envelope_keeps_what_belongs_to_it() -> None:
    side = receiving(64)
    for index in side.want():
        deliver(side, index)
    assert side.complete
    assert side.assembly.body() == SEALED.body
    assert (side.header_bytes, side.signature, side.wrap) == (
        SEALED.header,
        SEALED.signature,
        b"wrap",
    )
