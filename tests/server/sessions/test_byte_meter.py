"""Bytes: every message is counted once, under the right round, client, direction and cause."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import sample_run
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.tcp_info import TcpCounts
from fcil_protocol.link.zmq_link import HANDSHAKE_DOWN_BYTES, HANDSHAKE_UP_BYTES, wire_bytes
from fcil_protocol.messages.frames import encode
from fcil_protocol.messages.messages import Ack, Bye, Chunk, Hello, Message, Parts, Update, Want
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.sessions.byte_meter import ByteMeter
from sample_run import ALICE, BOB, RUN, Clock

KEY, NEXT = RoundKey(RUN, 0, "train", 0), RoundKey(RUN, 0, "train", 1)
PART, OLD = "ab" * 32, "cd" * 32
SIG = bytes(64)


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite", clock=Clock()) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        opened.tasks.open(RUN, 0, [0, 1])
        for key in (KEY, NEXT):
            opened.rounds.open(key, asked=(ALICE, BOB), base_state=0, remaining_s=60.0)
            opened.rounds.close(key, sample_run.Outcome.DONE)
        yield opened


@pytest.fixture
def accounts(ledger: Ledger) -> ByteMeter:
    made = ByteMeter(ledger, RUN)
    made.round_key = KEY
    return made


def frames(message: Message, *blobs: bytes) -> list[bytes]:
    return [encode(message), SIG if message.signed else b"", *blobs]


def counts(ledger: Ledger) -> dict[tuple, tuple[int, int, int, int]]:
    return {
        (c.round, c.client, c.direction, c.cause): (c.tensor, c.sealed, c.application, c.wire)
        for c in ledger.bytes.all(RUN)
    }


CHUNK = Chunk(digest=PART, index=0)
UPDATE = Update(digest=PART)
HELLO = Hello(protocol=1, oldest=1, package="", federation="f", client="c")


@pytest.mark.parametrize(
    ("message", "blobs", "cause", "sealed"),
    [
        (UPDATE, (b"h" * 300, SIG, b"w" * 1168), Cause.UPDATE, 0),
        (CHUNK, (b"s" * 5000,), Cause.UPDATE, 5000),
        (Want(digest=PART, chunks=[1]), (), Cause.CONTROL, 0),
        (HELLO, (), Cause.CONTROL, 0),
        (Bye(), (), Cause.CONTROL, 0),
    ],
    ids=["update", "chunk", "want", "hello", "bye"],
)
def test_a_message_of_a_client_is_charged_to_its_cause(
    accounts: ByteMeter, ledger: Ledger, message: Message, blobs: tuple, cause: Cause, sealed: int
) -> None:
    sent = frames(message, *blobs)
    accounts.received(ALICE, message, sent)
    accounts.flush()
    size = sum(map(len, sent))
    assert counts(ledger) == {(0, ALICE, Direction.UP, cause): (0, sealed, size, wire_bytes(sent))}


@pytest.mark.parametrize(
    ("message", "blobs", "cause", "sealed", "tensor"),
    [
        (Parts(digest=PART), (b"h" * 300, SIG, b"w"), Cause.BROADCAST, 0, 4000),
        (Parts(digest=OLD), (b"h" * 300, SIG, b"w"), Cause.CATCH_UP, 0, 4000),
        (CHUNK, (b"s" * 5000,), Cause.BROADCAST, 5000, 0),
        (Chunk(digest=OLD, index=1), (b"s" * 50,), Cause.CATCH_UP, 50, 0),
        (Ack(digest=PART), (), Cause.CONTROL, 0, 0),
    ],
    ids=["new part", "old part", "chunk of new", "chunk of old", "ack"],
)
def test_a_message_to_a_client_is_a_broadcast_catching_up_or_control(
    accounts: ByteMeter,
    ledger: Ledger,
    message: Message,
    blobs: tuple,
    cause: Cause,
    sealed: int,
    tensor: int,
) -> None:
    accounts.new_parts = {PART}
    sent = frames(message, *blobs)
    accounts.sent(BOB, message, sent, tensor=tensor)
    accounts.flush()
    size = sum(map(len, sent))
    assert counts(ledger) == {
        (0, BOB, Direction.DOWN, cause): (tensor, sealed, size, wire_bytes(sent))
    }


def test_a_connection_costs_its_handshake_in_both_directions(
    accounts: ByteMeter, ledger: Ledger
) -> None:
    for _ in range(3):
        accounts.connected(ALICE, 1)
    accounts.flush()
    assert counts(ledger) == {
        (0, ALICE, Direction.UP, Cause.HANDSHAKE): (0, 0, 0, 3 * HANDSHAKE_UP_BYTES),
        (0, ALICE, Direction.DOWN, Cause.HANDSHAKE): (0, 0, 0, 3 * HANDSHAKE_DOWN_BYTES),
    }


def test_tensor_bytes_join_the_update_they_belong_to(accounts: ByteMeter, ledger: Ledger) -> None:
    sent = frames(CHUNK, b"s" * 100)
    accounts.received(ALICE, CHUNK, sent)
    accounts.tensors_up(ALICE, 77)
    accounts.flush()
    (only,) = counts(ledger).values()
    assert only == (77, 100, sum(map(len, sent)), wire_bytes(sent))


def test_counts_add_up_over_flushes_and_nothing_is_written_twice(
    accounts: ByteMeter, ledger: Ledger
) -> None:
    sent = frames(Bye())
    for _ in range(3):
        accounts.received(ALICE, Bye(), sent)
        accounts.flush()
        accounts.flush()
    (only,) = counts(ledger).values()
    assert only == (0, 0, 3 * sum(map(len, sent)), 3 * wire_bytes(sent))


def test_bytes_are_charged_to_the_round_that_is_open_when_they_pass(
    accounts: ByteMeter, ledger: Ledger
) -> None:
    """Also when they are written later."""
    sent = frames(Bye())
    accounts.received(ALICE, Bye(), sent)
    accounts.round_key = NEXT
    accounts.received(ALICE, Bye(), sent)
    accounts.received(ALICE, Bye(), sent)
    accounts.round_key = None
    accounts.received(ALICE, Bye(), sent)
    accounts.flush()
    size = sum(map(len, sent))
    assert {k[0]: v[2] for k, v in counts(ledger).items()} == {
        0: size,
        1: 2 * size,
        None: size,
    }


def test_clients_are_kept_apart(accounts: ByteMeter, ledger: Ledger) -> None:
    accounts.received(ALICE, Bye(), frames(Bye()))
    accounts.received(BOB, Bye(reason="longer"), frames(Bye(reason="longer")))
    accounts.flush()
    by_client = {k[1]: v[2] for k, v in counts(ledger).items()}
    assert by_client[BOB] == by_client[ALICE] + len(b"\xa6reason\xa6longer")


def test_what_could_not_be_written_is_written_at_the_next_flush(
    accounts: ByteMeter, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk loses no count."""
    from fcil_protocol.errors import DiskFull

    accounts.received(ALICE, Bye(), frames(Bye()))
    accounts.received(BOB, Bye(), frames(Bye()))

    def full(*args: object, **kwargs: object) -> None:
        raise DiskFull("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.bytes, "add", full)
        with pytest.raises(DiskFull):
            accounts.flush()
    accounts.received(ALICE, Bye(), frames(Bye()))
    accounts.flush()
    size = sum(map(len, frames(Bye())))
    assert {k[1]: v[2] for k, v in counts(ledger).items()} == {ALICE: 2 * size, BOB: size}


class Kernel:
    """Tells what it was given, once."""

    def __init__(self) -> None:
        self.grown: dict[int, TcpCounts] = {}

    def __call__(self) -> list[dict[int, TcpCounts]]:
        told, self.grown = self.grown, {}
        return [told]


def tcp_counts(ledger: Ledger) -> dict[tuple, tuple[int, int, int]]:
    return {
        (c.round, c.client, c.direction): (c.wire, c.retransmitted, c.link)
        for c in ledger.bytes.all(RUN)
        if c.source is CountSource.KERNEL
    }


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def watched(ledger: Ledger, kernel: Kernel) -> ByteMeter:
    made = ByteMeter(ledger, RUN, kernel=kernel)
    asyncio.run(made.begin(KEY, set()))
    return made


def test_a_connections_growth_is_its_clients_in_both_directions(
    watched: ByteMeter, ledger: Ledger, kernel: Kernel
) -> None:
    watched.connected(ALICE, 1)
    kernel.grown = {1: TcpCounts(100, 70, 7, 166, 143)}
    watched.flush()
    kernel.grown = {1: TcpCounts(1, 2, 0, 67, 68)}
    watched.flush()
    watched.flush()
    assert tcp_counts(ledger) == {
        (0, ALICE, Direction.UP): (101, 0, 233),
        (0, ALICE, Direction.DOWN): (72, 7, 211),
    }


def test_what_a_connection_carried_until_a_round_began_belongs_to_the_one_before(
    watched: ByteMeter, ledger: Ledger, kernel: Kernel
) -> None:
    watched.connected(ALICE, 1)
    kernel.grown = {1: TcpCounts(received=10)}
    asyncio.run(watched.begin(NEXT, {PART}))
    kernel.grown = {1: TcpCounts(received=5)}
    watched.flush()
    assert {k[0]: v[0] for k, v in tcp_counts(ledger).items() if k[2] is Direction.UP} == {
        0: 10,
        1: 5,
    }
    assert watched.new_parts == {PART}


def test_the_last_bytes_of_an_ended_connection_are_its_clients(
    watched: ByteMeter, ledger: Ledger, kernel: Kernel
) -> None:
    watched.connected(ALICE, 1)
    watched.departed(1)
    kernel.grown = {1: TcpCounts(received=10)}
    watched.flush()
    kernel.grown = {1: TcpCounts(received=3)}  # of nobody: the number is not given again
    watched.flush()
    assert {k[1]: v[0] for k, v in tcp_counts(ledger).items() if k[2] is Direction.UP} == {
        ALICE: 10,
        None: 3,
    }


def test_bytes_of_strangers_are_counted_without_a_client(
    watched: ByteMeter, ledger: Ledger, kernel: Kernel
) -> None:
    kernel.grown = {0: TcpCounts(received=64), 9: TcpCounts(received=36)}
    watched.flush()
    assert tcp_counts(ledger)[0, None, Direction.UP] == (100, 0, 0)
