"""An intake process in its clients' sessions: what it does by itself, and what it leaves."""

import asyncio
import os

import pytest

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, open_body, seal, unwrap_key, wrap_key
from fcil_protocol.envelopes.transfer import MAX_SPOILED
from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.link.interface import wire_bytes
from fcil_protocol.messages.frames import Received, encode, parse
from fcil_protocol.messages.messages import (
    Ack,
    Chunk,
    Hello,
    Parts,
    Progress,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.messages.signed_session import TAG_BYTES, Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.sessions.intake_pool import transfers as transfers_module
from fcil_server.sessions.intake_pool.transfers import (
    CONTROL,
    UPDATE,
    UPDATE_BYTES,
    RoundTransfers,
    SmallPart,
)

SERVER, CLIENT, OTHER = (PrivateKeys.generate() for _ in range(3))
RUN = RunId("r20260102-030405-0a0b")
KEY = RoundKey(RUN, 0, "train", 3)
CONN, CHUNK, CREDIT = 7, 16 << 10, 8 << 20


def core(direction="update", *, keys=CLIENT, round_=3, kind="train", part="", base=3):
    sender = "a" * 26 if direction == "update" else "server"
    return Core(
        protocol=PROTOCOL_VERSION, federation="0" * 32, run=RUN, direction=direction,
        sender=sender, sender_key=keys.public.fingerprint,
        recipient="server" if direction == "update" else "client", method="m", schema="",
        task=0, round=round_, kind=kind, base=base, part=part,
    )  # fmt: skip


class Process:
    """The transfers of a process with one session, and that session's client."""

    def __init__(self, left=""):
        self.sent, self.whole, self.faults = [], [], []
        self.begun, self.lost, self.reads = [], [], True
        self.transfers = RoundTransfers(
            credit=CREDIT,
            processes=2,
            send=self._send,
            begun=lambda *update: self.begun.append(update),
            arrived=lambda *update: self.whole.append(update),
            lost=lambda *update: self.lost.append(update),
            faulty=lambda *fault: self.faults.append(fault),
        )
        self.server = Channel(SERVER, CLIENT.public)
        self.client = Channel(CLIENT, SERVER.public)
        self.server.peer_nonce, self.client.peer_nonce = self.client.nonce, self.server.nonce
        self.server.agree_as_server(self.client.session_key)
        self.server.frames(
            Welcome(
                protocol=1, server_nonce=self.server.nonce, certificate=b"", run=RUN, method="m",
                method_version="1", hparams="{}", schema_digest="ab" * 32, backbone="{}",
                needs_backbone=False, ready=True, max_payload_bytes=1, credit=1,
            )
        )  # fmt: skip
        self.client.agree_as_client(self.server.session_key)
        self.transfers.begin(CONN, self.server.hand_over(), CLIENT.public, left)
        self.transfers.open_round(KEY, {}, 3)

    def _send(self, conn, frames):
        if self.reads:
            self.sent.append((conn, list(frames)))
        return self.reads

    def take(self, message, *blobs):
        """Let the client send a message; True: the process did what it asks for."""
        return self.transfers.take(CONN, self.client.frames(message, *blobs))

    def heard(self):
        """Return what the client gets, each checked as a client does."""
        frames = [parse(frames) for _, frames in self.sent]
        self.sent.clear()
        for received in frames:
            self.client.check(received)
        return frames


def sealed_update(size=40_000, keys=CLIENT, **fields):
    """Return an update's body in 16 KiB chunks, and its message's blobs."""
    sealed, key = seal(os.urandom(size), core(keys=keys, **fields), keys, chunk_bytes=CHUNK)
    wrap = wrap_key(key, sealed.header, SERVER.public)
    return sealed, (sealed.header, sealed.signature, wrap)


def in_a_loop(story):
    async def limited():
        await asyncio.wait_for(story(), 60)

    asyncio.run(limited())


def test_an_update_arrives_whole_at_the_process_and_once_at_the_server():
    async def story():
        process = Process()
        sealed, blobs = sealed_update()
        assert process.take(Update(digest=sealed.parsed.update_id, unasked=1), *blobs)
        (want,) = process.heard()
        assert want.message == Want(
            digest=sealed.parsed.update_id, chunks=[1, 2], span=want.message.span,
            seq=want.message.seq,
        )  # fmt: skip
        for index in range(3):
            chunk = sealed.chunk(index)
            assert process.take(Chunk(digest=sealed.parsed.update_id, index=index), chunk)
        ((conn, digest, head, chunks),) = process.whole
        assert (conn, digest, head) == (CONN, sealed.parsed.update_id, blobs)
        key = unwrap_key(head[2], head[0], SERVER)
        assert len(open_body(sealed.parsed, key, chunks)) == 40_000
        # Offered again, as after a lost Ack: the server knows what became of it.
        assert not process.take(Update(digest=digest), *blobs)
        assert not process.faults

    in_a_loop(story)


@pytest.mark.parametrize(
    "fields",
    [{"round_": 2}, {"base": 10}, {"kind": "headtune"}, {"kind": INVENTORY}, {"keys": OTHER}],
    ids=[
        "of another round",
        "of another state",
        "of another kind",
        "a list of classes",
        "signed by another",
    ],
)
def test_what_is_not_an_update_of_the_round_by_its_client_passes(fields):
    async def story():
        process = Process()
        sealed, blobs = sealed_update(**fields)
        assert not process.take(Update(digest=sealed.parsed.update_id), *blobs)
        # Its chunks are the server's too.
        assert not process.take(Chunk(digest=sealed.parsed.update_id, index=0), sealed.chunk(0))
        assert not process.sent
        assert not process.take(Progress(run=RUN, task=0, kind="train", round=3, phase="working",
                                         done=1, total=2))  # fmt: skip

    in_a_loop(story)


def test_large_updates_and_those_for_a_relay_pass():
    async def story():
        process = Process()
        large, blobs = sealed_update(UPDATE_BYTES + 1)
        assert not process.take(Update(digest=large.parsed.update_id), *blobs)
        small, blobs = sealed_update()
        assert not process.take(Update(digest=small.parsed.update_id), *blobs, b"")
        # The most that is taken.
        largest, blobs = sealed_update(UPDATE_BYTES)
        assert process.take(Update(digest=largest.parsed.update_id), *blobs)

    in_a_loop(story)


def test_messages_of_another_session_or_sent_twice_are_left_to_the_server_to_refuse():
    async def story():
        process = Process()
        sealed, blobs = sealed_update()
        frames = process.client.frames(Update(digest=sealed.parsed.update_id), *blobs)
        forged = [frames[0], bytes(16), *frames[2:]]
        assert not process.transfers.take(CONN, forged)
        assert process.transfers.take(CONN, frames)
        wants = len(process.sent)
        assert not process.transfers.take(CONN, frames)  # repeated
        assert len(process.sent) == wants
        process.server.note_heard(process.transfers.heard(CONN))
        with pytest.raises(WireError, match="twice or late"):
            process.server.check(parse(frames))
        assert not process.transfers.take(CONN + 1, frames)  # no session there

    in_a_loop(story)


def test_a_chunk_that_does_not_fit_is_requested_again_and_at_last_refused():
    async def story():
        process = Process()
        sealed, blobs = sealed_update()
        digest = sealed.parsed.update_id
        process.take(Update(digest=digest), *blobs)
        for _ in range(MAX_SPOILED):
            assert process.take(Chunk(digest=digest, index=0), bytes(CHUNK))
        assert [(conn, about) for conn, about, _ in process.faults] == [(CONN, "")] * MAX_SPOILED
        assert [w.message.chunks for w in process.heard()][1:] == [[0]] * MAX_SPOILED
        assert process.take(Chunk(digest=digest, index=0), bytes(CHUNK))
        assert process.faults[-1][1] == digest
        assert isinstance(process.faults[-1][2], WireError)
        assert not process.take(Chunk(digest=digest, index=0), sealed.chunk(0))  # it is over

    in_a_loop(story)


def test_the_chunks_before_one_that_does_not_fit_complete_no_update_that_was_given_up(monkeypatch):
    async def story():
        two = Two(monkeypatch)
        process, sealed = two.process, two.first
        digest, last = sealed.parsed.update_id, len(sealed.parsed.hashes) - 1
        assert two.offer()
        for _ in range(MAX_SPOILED):
            assert process.take(Chunk(digest=digest, index=0), bytes(CHUNK))
        for index in range(last):
            assert process.take(Chunk(digest=digest, index=index), sealed.chunk(index))
        two.asked()
        whole = [*sealed.chunk(last), *bytes(CHUNK)]
        assert process.take(Chunk(digest=digest, index=last), bytes(whole))
        assert process.faults[-1][1] == digest
        assert not process.whole
        assert CONN + 1 in two.asked(), "the next in line has its room at once"

    in_a_loop(story)


def test_a_wrapped_key_of_another_length_is_left_to_the_server_to_refuse():
    async def story():
        process = Process()
        sealed, (header, signature, wrap) = sealed_update()
        update = Update(digest=sealed.parsed.update_id)
        assert not process.take(update, header, signature, wrap + b" " * 2_000_000)
        assert not process.sent

    in_a_loop(story)


def test_a_client_has_one_update_under_way_and_none_after_its_end():
    async def story():
        process = Process()
        first, blobs = sealed_update()
        process.take(Update(digest=first.parsed.update_id), *blobs)
        second, blobs = sealed_update()
        process.take(Update(digest=second.parsed.update_id), *blobs)
        assert not process.take(Chunk(digest=first.parsed.update_id, index=0), first.chunk(0))
        assert process.take(Chunk(digest=second.parsed.update_id, index=0), second.chunk(0))
        process.transfers.end(CONN)
        ((conn, digest, head, chunks, goes_on),) = process.lost
        assert (conn, digest, head, goes_on) == (CONN, second.parsed.update_id, blobs, False)
        assert chunks == {0: second.chunk(0)}
        assert process.transfers._arriving_bytes == 0
        assert not process.take(Chunk(digest=second.parsed.update_id, index=1), second.chunk(1))

    in_a_loop(story)


def test_an_update_that_was_lost_with_another_connection_is_left_to_the_server():
    async def story():
        sealed, blobs = sealed_update()
        digest = sealed.parsed.update_id
        process = Process()
        assert process.take(Update(digest=digest), *blobs)
        assert process.begun == [(CONN, digest)]
        later = Process(left=digest)
        assert not later.take(Update(digest=digest), *blobs)
        another, blobs = sealed_update()
        assert later.take(Update(digest=another.parsed.update_id), *blobs)

    in_a_loop(story)


def test_an_update_that_is_arriving_as_its_round_ends_comes_to_the_server_which_answers_it():
    async def story():
        process = Process()
        sealed, blobs = sealed_update()
        digest = sealed.parsed.update_id
        process.take(Update(digest=digest), *blobs)
        process.transfers.open_round(KEY._replace(round=4), {})
        count = len(sealed.parsed.hashes)
        for index in range(count):
            assert process.take(Chunk(digest=digest, index=index), sealed.chunk(index))
        ((conn, arrived, head, chunks),) = process.whole
        assert (conn, arrived, head) == (CONN, digest, blobs)
        assert len(chunks) == count
        assert process.transfers._arriving_bytes == 0
        another, blobs = sealed_update()
        assert not process.take(Update(digest=another.parsed.update_id), *blobs), "too late"

    in_a_loop(story)


class Two:
    """A process with two clients, and memory for one update at a time."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(transfers_module, "MEMORY_BYTES", 100_000)  # of two processes
        self.process = Process()
        self.other = Process()
        self.process.transfers.begin(CONN + 1, self.other.server.hand_over(), CLIENT.public, "")
        (self.first, blobs), (self.second, self.blobs) = sealed_update(), sealed_update()
        assert self.process.take(Update(digest=self.first.parsed.update_id), *blobs)
        self.process.sent.clear()

    def offer(self, unasked=0):
        message = Update(digest=self.second.parsed.update_id, unasked=unasked)
        return self.process.transfers.take(CONN + 1, self.other.client.frames(message, *self.blobs))

    def asked(self):
        """Return the connections whose clients were asked for chunks since the last call."""
        conns, self.process.sent = [conn for conn, _ in self.process.sent], []
        return conns


def test_an_update_waits_in_line_for_memory(monkeypatch):
    async def story():
        two = Two(monkeypatch)
        assert two.offer()
        assert two.asked() == []
        for index in range(3):
            message = Chunk(digest=two.first.parsed.update_id, index=index)
            assert two.process.take(message, two.first.chunk(index))
        assert [conn for conn, *_ in two.process.whole] == [CONN]
        assert CONN + 1 in two.asked()

    in_a_loop(story)


def test_one_whose_first_chunks_are_on_their_way_passes_if_there_is_no_memory(monkeypatch):
    async def story():
        two = Two(monkeypatch)
        assert not two.offer(unasked=1)

    in_a_loop(story)


@pytest.mark.parametrize("how", ["it leaves", "it is idle"])
def test_a_client_that_sends_nothing_keeps_no_other_waiting(monkeypatch, how):
    async def story():
        two = Two(monkeypatch)
        assert two.offer()
        if how == "it leaves":
            two.process.transfers.end(CONN)
        else:
            monkeypatch.setattr(transfers_module, "IDLE_S", 0.0)
            two.process.transfers.revive()
        assert CONN + 1 in two.asked()

    in_a_loop(story)


def test_clients_that_offer_and_send_nothing_leave_the_memory_to_the_next_in_line(monkeypatch):
    """However many they are, and more than the memory that idle updates have of their own."""

    async def story():
        two = Two(monkeypatch)  # memory for one update, and for as much that is idle
        idle = [Process() for _ in range(3)]
        monkeypatch.setattr(transfers_module, "IDLE_S", 0.0)
        for conn, one in enumerate(idle, CONN + 2):
            two.process.transfers.begin(conn, one.server.hand_over(), CLIENT.public, "")
            sealed, blobs = sealed_update()
            frames = one.client.frames(Update(digest=sealed.parsed.update_id), *blobs)
            assert two.process.transfers.take(conn, frames)
            two.process.transfers.revive()
        assert two.offer()
        two.asked()
        two.process.transfers.revive()
        assert CONN + 1 in two.asked()
        # What was given up is the server's, with the session's other messages.
        first = two.first.parsed
        (given_up, *_) = two.process.lost
        assert (given_up[0], given_up[1], given_up[3:]) == (CONN, first.update_id, ({}, True))
        assert not two.process.take(Chunk(digest=first.update_id, index=0), two.first.chunk(0))

    in_a_loop(story)


def test_a_slow_client_is_not_given_up_where_that_makes_no_room(monkeypatch):
    """Its memory does not count while idle clients have no more than their own."""

    async def story():
        two = Two(monkeypatch)
        fast, third = Process(), Process()
        monkeypatch.setattr(transfers_module, "IDLE_S", 0.0)
        two.process.transfers.revive()  # the first is idle: another has room
        for conn, one in ((CONN + 2, fast), (CONN + 3, third)):
            two.process.transfers.begin(conn, one.server.hand_over(), CLIENT.public, "")
            sealed, blobs = sealed_update()
            frames = one.client.frames(Update(digest=sealed.parsed.update_id), *blobs)
            assert two.process.transfers.take(conn, frames)
        monkeypatch.setattr(transfers_module, "IDLE_S", 3600.0)
        now = transfers_module._now()
        two.process.transfers._clients[CONN].receiver.pace._news = now - 7200
        two.process.transfers.revive()
        assert not two.process.lost
        assert CONN + 3 in two.process.transfers._line

    in_a_loop(story)


def test_who_waits_in_line_is_forgotten_with_the_round_or_the_connection(monkeypatch):
    async def story():
        for end in (
            lambda transfers: transfers.end(CONN + 1),
            lambda transfers: transfers.open_round(KEY._replace(round=4), {}),
        ):
            two = Two(monkeypatch)
            assert two.offer()
            end(two.process.transfers)
            assert not two.process.transfers._line
            two.process.transfers.end(CONN)
            assert two.asked() == []

    in_a_loop(story)


def small_part():
    data = os.urandom(50_000)
    sealed, key = seal(
        data, core("broadcast", keys=SERVER, part="current"), SERVER, chunk_bytes=CHUNK
    )
    part = SmallPart(sealed.parsed, sealed.header, sealed.signature, key, bytes(sealed.body))
    return data, sealed.parsed.update_id, part


def test_a_client_gets_a_part_with_its_key_and_opens_it():
    async def story():
        process = Process()
        data, digest, part = small_part()
        process.transfers.open_round(KEY, {digest: part}, 3)
        assert process.take(Want(digest=digest, chunks=[0, 1, 2, 3], span=4, header=True))
        head, *chunks = process.heard()
        assert head.message.type == Parts.type
        key = unwrap_key(head.blobs[2], head.blobs[0], CLIENT)
        body = b"".join(chunk.blobs[0] for chunk in chunks)
        opened = open_body(part.header, key, [bytes(c) for c in part.header.split(body)])
        assert bytes(opened) == data
        assert not process.take(Want(digest=digest, chunks=[99], header=False))  # no such chunk
        assert not process.take(Want(digest="c" * 64, chunks=[0], header=True))

    in_a_loop(story)


def test_a_client_that_does_not_read_gets_nothing_more():
    async def story():
        process = Process()
        _, digest, part = small_part()
        process.transfers.open_round(KEY, {digest: part}, 3)
        process.reads = False
        assert process.take(Want(digest=digest, chunks=[0, 1, 2, 3], span=1, header=True))
        assert not any(sent for _, _, sent, *_ in process.transfers.take_flows())
        process.reads = True
        assert process.take(Want(digest=digest, chunks=[0, 1], span=1, header=True))
        assert len(process.heard()) == 3

    in_a_loop(story)


def test_all_bytes_are_counted_with_their_causes():
    async def story():
        process = Process()
        _, digest, part = small_part()
        process.transfers.open_round(KEY, {digest: part}, 3)
        up, down = {CONTROL: 0, UPDATE: 0}, {CONTROL: 0, digest: 0}
        want = process.client.frames(Want(digest=digest, chunks=[0], header=True))
        process.transfers.take(CONN, want)
        up[CONTROL] += wire_bytes(want)
        down[digest] += sum(wire_bytes(frames) for _, frames in process.sent)
        process.sent.clear()
        sealed, blobs = sealed_update()
        for message, *more in (
            (Update(digest=sealed.parsed.update_id), *blobs),
            (Chunk(digest=sealed.parsed.update_id, index=0), sealed.chunk(0)),
        ):
            frames = process.client.frames(message, *more)
            process.transfers.take(CONN, frames)
            up[UPDATE] += wire_bytes(frames)
        down[CONTROL] += sum(wire_bytes(frames) for _, frames in process.sent)
        # The server counts its own message as it made it; the rest is told with the others.
        made = process.server.frames(Ack(digest=digest))
        down[CONTROL] += wire_bytes(process.transfers.stamp(CONN, made)) - wire_bytes(made)
        flows = process.transfers.take_flows()
        assert {about: wire for _, about, sent, _, _, _, wire in flows if not sent} == up
        assert {about: wire for _, about, sent, _, _, _, wire in flows if sent} == down
        assert [parts for _, about, _, parts, *_ in flows if about == digest] == [1]
        assert not process.transfers.take_flows()

    in_a_loop(story)


def test_the_servers_own_messages_get_their_mac_here():
    async def story():
        process = Process()
        made = process.server.frames(Ack(digest="ab" * 32))
        assert len(made[1]) == TAG_BYTES
        stamped = process.transfers.stamp(CONN, made)
        assert process.client.check(parse(stamped)).digest == "ab" * 32
        with pytest.raises(WireError):
            process.client.check(parse(stamped))  # sent twice
        chunk = process.server.frames(Chunk(digest="ab" * 32, index=0), b"x")
        assert process.transfers.stamp(CONN, chunk) == chunk
        signed = [encode(Ack(digest="ab" * 32)), bytes(64)]
        assert process.transfers.stamp(CONN, signed) == signed
        old = process.server.frames(Ack(digest="cd" * 32))
        hello = Hello(nonce=process.client.nonce, protocol=1, oldest=1, package="",
                      federation="f", client="c")  # fmt: skip
        assert not process.take(hello)
        # The server may refuse it, and the session goes on there.
        assert process.client.check(parse(process.transfers.stamp(CONN, old)))
        sealed, blobs = sealed_update()
        assert not process.take(Update(digest=sealed.parsed.update_id), *blobs)
        process.transfers.end(CONN)
        assert process.transfers.stamp(CONN, made) is None
        assert process.transfers.stamp(CONN, chunk) == chunk

    in_a_loop(story)


def test_a_message_of_an_earlier_session_does_not_leave_in_the_next():
    process, earlier = Process(), Process()
    assert process.transfers.stamp(CONN, earlier.server.frames(Ack(digest="ab" * 32))) is None


@pytest.mark.parametrize("frames", [[b"lane" + bytes(8)], [b"lane" + bytes(8), b"", b"x"]])
def test_messages_to_a_relay_leave_as_they_are(frames):
    assert Process().transfers.stamp(CONN + 1, frames) == frames


def test_a_handed_session_refuses_what_its_client_did_not_send():
    process = Process()
    session = process.server.hand_over()
    other = Process().client.frames(Ack(digest="ab" * 32))
    own = process.client.frames(Ack(digest="ab" * 32))
    altered = [own[0][:-1] + bytes([own[0][-1] ^ 1]), own[1]]
    for frames in (other, altered):
        with pytest.raises(BadSignature):
            session.check(Received(parse(own).message, frames[0], frames[1], ()))
    session.check(parse(own))
