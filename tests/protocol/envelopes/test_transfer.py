"""Chunks on request: the receiver never has more in flight than its window, and gets all.

Whatever happens to messages on their way, the sender's bytes arrive, and no others.
"""

from __future__ import annotations

import hashlib
import random
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, Sealed, seal
from fcil_protocol.envelopes.transfer import (
    MAX_SPOILED,
    IncomingEnvelope,
    Receiver,
    Sender,
    granted,
    unrequested_chunks,
)
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S, MAX_SPAN_BYTES, MIN_WINDOW_BYTES
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


def begin(
    made: Receiver,
    sealed: Sealed = SEALED,
    *,
    path: Path | None = None,
    now: float = 0.0,
    unasked: int = 0,
) -> IncomingEnvelope:
    blobs = (sealed.header, sealed.signature, b"wrap")
    return made.begin(blobs, Assembly(sealed.parsed, path=path), now, unasked=unasked)


def receiver(chunks: int, *sealed: Sealed, unasked: int = 0) -> Receiver:
    """Return a receiver whose window has so many chunks, with these envelopes under way."""
    made = Receiver(chunks * CHUNK)
    for one in sealed or (SEALED,):
        begin(made, one, unasked=unasked)
    return made


def sender(sealed: Sealed = SEALED) -> Sender:
    return Sender(sealed.parsed, sealed.stored(b"wrap").read)


def wanted(made: Receiver, now: float = 0.0) -> list[int]:
    return [index for want in made.wants(now) for index in want.chunks]


def deliver(made: Receiver, index: int, now: float = 0.0) -> None:
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
    made = receiver(chunks, unasked=first)
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
    made = receiver(8)
    assert wanted(made) == list(range(8))
    for index in range(3):
        deliver(made, index)
        assert wanted(made) == []
    deliver(made, 3)
    assert wanted(made) == [8, 9, 10, 11]


def test_what_a_sender_sends_unasked_is_not_asked_for() -> None:
    made = receiver(8, unasked=8)
    assert wanted(made) == []
    for index in range(4):
        deliver(made, index)
    assert wanted(made) == [8, 9, 10, 11]


def test_a_sender_sends_few_chunks_unasked() -> None:
    assert unrequested_chunks(SEALED.parsed) * CHUNK == 128 << 10
    large = seal(bytes(9 << 20), CORE, KEYS, chunk_bytes=1 << 20)[0]
    assert unrequested_chunks(large.parsed) == 1
    small = seal(b"x", CORE, KEYS, chunk_bytes=CHUNK)[0]
    assert unrequested_chunks(small.parsed) == 1


def test_envelopes_of_one_connection_share_its_window_in_order() -> None:
    first, second = another(1), another(2)
    made = receiver(6, first, second)
    assert [(w.digest, w.chunks) for w in made.wants(0.0)] == [
        (first.parsed.update_id, [0, 1, 2, 3]),
        (second.parsed.update_id, [0, 1]),
    ]
    made.end(first.parsed.update_id)
    assert [(w.digest, w.chunks) for w in made.wants(0.0)] == [(second.parsed.update_id, [2, 3])]
    assert made.end("of none") is None


def test_a_window_smaller_than_a_chunk_brings_one_at_a_time() -> None:
    made = Receiver(1)
    begin(made)
    assert wanted(made) == [0]
    assert wanted(made) == []
    deliver(made, 0)
    assert wanted(made) == [1]


def test_a_link_that_brings_much_is_asked_for_more_in_larger_messages() -> None:
    large = seal(bytes(2 << 20), CORE, KEYS, chunk_bytes=CHUNK)[0]
    made = Receiver(1 << 20)
    begin(made, large)
    [first] = made.wants(0.0)
    assert (len(first.chunks) * CHUNK, first.span) == (MIN_WINDOW_BYTES, 1)
    for index in first.chunks:
        made.put(large.parsed.update_id, index, bytes(large.chunk(index)), 0.01)
    [second] = made.wants(0.01)
    assert (len(second.chunks) * CHUNK, second.span) == (2 * MIN_WINDOW_BYTES, 4)


def test_a_message_may_carry_several_chunks() -> None:
    made = receiver(8)
    wanted(made)
    made.put(DIGEST, 0, SEALED.body[: 5 * CHUNK], 0.0)
    assert made.pace.in_flight == 3 * CHUNK
    assert wanted(made) == [8, 9, 10, 11, 12]


def test_after_a_lost_connection_what_was_in_flight_is_asked_for_again() -> None:
    made = receiver(4)
    assert wanted(made) == [0, 1, 2, 3]
    deliver(made, 1)
    made.lose()
    assert wanted(made) == [0, 2, 3, 4]


def test_what_never_comes_on_a_connection_that_lives_is_asked_for_again() -> None:
    made = receiver(4)
    wanted(made)
    deliver(made, 1, now=5.0)
    assert not made.revive(LOSS_TIMEOUT_S)
    assert wanted(made, LOSS_TIMEOUT_S) == []
    assert made.revive(LOSS_TIMEOUT_S + 5)
    assert wanted(made, LOSS_TIMEOUT_S + 5) == [0, 2, 3, 4]


def test_an_interrupted_transfer_goes_on_at_the_first_missing_chunk(tmp_path: Path) -> None:
    """The file remembers; what the sender sends unasked is not waited for twice."""
    path = tmp_path / "incoming"
    first = begin(Receiver(CHUNK), path=path)
    for index in (0, 1, 2, 3, 4, 7):
        first.put(index, bytes(SEALED.chunk(index)))
    made = Receiver(4 * CHUNK)
    begin(made, path=path, unasked=4)
    assert wanted(made) == [5, 6, 8, 9]


def test_a_chunk_twice_is_no_news_and_costs_no_window() -> None:
    made = receiver(2)
    assert wanted(made) == [0, 1]
    deliver(made, 0)
    deliver(made, 0)
    assert made.pace.in_flight == CHUNK
    assert wanted(made) == [2]


def test_a_chunk_of_no_envelope_under_way_is_let_pass() -> None:
    assert receiver(2).put("0" * 64, 0, b"x", 0.0) is None


def test_an_altered_chunk_is_refused_and_asked_for_again_a_few_times() -> None:
    made = receiver(2)
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
        receiver(2).put(DIGEST, index, b"x", 0.0)


def test_a_complete_envelope_keeps_what_belongs_to_it() -> None:
    made = receiver(64)
    while missing := wanted(made):
        for index in missing:
            deliver(made, index)
    side = made.end(DIGEST)
    assert side is not None
    assert side.complete
    assert b"".join(side.assembly.steps()) == SEALED.body
    assert (side.header_bytes, side.signature, side.wrap) == (
        SEALED.header,
        SEALED.signature,
        b"wrap",
    )


@given(st.lists(st.integers(0, CHUNKS - 1), max_size=40), st.integers(1, 100))
def test_messages_carry_all_chunks_in_order_and_none_is_too_long(
    indices: list[int], span: int
) -> None:
    found = list(sender().messages(indices, span))
    assert b"".join(d for _, d in found) == b"".join(bytes(SEALED.chunk(i)) for i in indices)
    numbers = [m.index + n for m, d in found for n in range(-(-len(d) // CHUNK))]
    assert numbers == indices
    assert all(0 < len(data) <= min(span * CHUNK, MAX_SPAN_BYTES) for _, data in found)
    assert {message.digest for message, _ in found} <= {DIGEST}


def test_consecutive_chunks_share_a_message() -> None:
    found = sender().messages([0, 1, 2, 3, 4, 5, 9, 8], 4)
    assert [(m.index, len(d) // CHUNK) for m, d in found] == [(0, 4), (4, 2), (9, 1), (8, 1)]


def test_a_sender_reads_a_message_when_it_is_its_turn() -> None:
    """No more than one message of an envelope is in memory for one request."""
    read: list[range] = []
    messages = Sender(SEALED.parsed, lambda run: read.append(run) or b"").messages(range(8), 4)
    next(messages)
    assert read == [range(4)]
    next(messages)
    assert read == [range(4), range(4, 8)]


def test_an_answer_has_each_chunk_once_and_no_more_than_the_limit() -> None:
    assert granted(SEALED.parsed, [3, 3, 1, 3, 2], 2 * CHUNK) == [3, 1]
    assert granted(SEALED.parsed, [5, 6], 0) == [5], "a chunk larger than the limit goes alone"
    assert granted(SEALED.parsed, [], CHUNK) == []


class Line:
    """A sender and a receiver, and the messages between them, which may be delivered or harmed."""

    def __init__(self, path: Path | None, chunks: int, first: int) -> None:
        self.path, self.now = path, 0.0
        self.receiver = Receiver(chunks * CHUNK)
        self.flight: list[tuple[int, bytes]] = []
        self.refused: list[str] = []
        self.begin(first)

    def begin(self, first: int) -> None:
        """Offer the envelope, with its first chunks."""
        begin(self.receiver, path=self.path, unasked=first, now=self.now)
        self.send(range(first), 4)

    @property
    def envelope(self) -> IncomingEnvelope:
        return self.receiver.under_way[DIGEST]

    def send(self, chunks: Iterable[int], span: int) -> None:
        messages = sender().messages(chunks, span)
        self.flight += [(message.index, data) for message, data in messages]

    def ask(self) -> None:
        """Let the sender answer the requests of the receiver."""
        for want in self.receiver.wants(self.now):
            self.send(want.chunks, want.span)
        assert 0 <= self.receiver.pace.in_flight == self.envelope.asked_bytes
        assert self.envelope.asked_bytes <= max(self.receiver.pace.most_bytes, 8 * CHUNK)

    def take(self, index: int, data: bytes) -> None:
        """Deliver a message; what does not fit is refused and leaves no byte."""
        try:
            self.receiver.put(DIGEST, index, data, self.now)
        except WireError as error:
            self.refused.append(error.message)

    def meet(self, fate: str, at: int, cut: int) -> None:
        """Let one of the messages on their way meet its fate, or all of them."""
        if fate == "reconnect":  # what was on its way is lost
            self.flight.clear()
            self.receiver.lose()
        elif fate == "restart":  # of the receiver, which a file outlives
            self.flight.clear()
            self.receiver = Receiver(self.receiver.pace.most_bytes)
            self.begin(0)
        elif fate == "wait":
            self.now += LOSS_TIMEOUT_S
            self.receiver.revive(self.now)
        elif self.flight:
            index, data = self.flight.pop(at % len(self.flight))
            if fate == "twice":
                self.take(index, data)
            elif fate == "cut":
                data = data[: cut % len(data)]
            elif fate == "altered":
                changed = bytearray(data)
                changed[cut % len(data)] ^= 1
                data = bytes(changed)
            elif fate == "misnumbered":
                index += cut % CHUNKS
            if fate != "lost":
                self.take(index, data)


REFUSAL = re.compile(
    r"chunk \d+: expected \d+ bytes, got \d+\.|does not match its hash\.|chunk of 0 to 20, got \d+\."
)
FATES = (
    "arrives",
    "lost",
    "twice",
    "cut",
    "altered",
    "misnumbered",
    "wait",
    "reconnect",
    "restart",
)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from(FATES), st.integers(0, 63), st.integers(0, 1 << 18))),
    st.integers(1, 40),
    st.integers(0, 8),
    st.booleans(),
)
def test_whatever_happens_on_the_way_the_bytes_of_the_sender_arrive_and_no_others(
    fates: list[tuple[str, int, int]], chunks: int, first: int, on_disk: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        line = Line(Path(folder) / "incoming" if on_disk else None, chunks, first)
        line.ask()
        for fate, at, cut in fates:
            line.meet(fate, at, cut)
            line.ask()
        while not line.envelope.complete:  # from here on all is well
            if not line.flight:
                line.now += LOSS_TIMEOUT_S
                assert line.receiver.revive(line.now), "there is nothing to wait for"
                line.ask()
            line.take(*line.flight.pop(0))
            line.ask()
        whole = line.receiver.end(DIGEST)
        assert whole is not None
        assert b"".join(whole.assembly.steps()) == SEALED.body
        assert line.receiver.pace.in_flight == 0
        assert all(REFUSAL.search(message) for message in line.refused)
