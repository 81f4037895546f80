"""How the server asks for what it lacks: at the client's pace, again after a loss, not twice."""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes import partial_envelopes
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.envelopes.transfer import MAX_SPOILED
from fcil_protocol.envelopes.window import ASKED_BYTES, LOSS_TIMEOUT_S, MIN_WINDOW_BYTES
from fcil_protocol.errors import WireError, WrongFederation
from fcil_protocol.ids import FederationId
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Ack, Chunk, Nack, Update, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.daemon.dispatch import Dispatch
from fcil_server.sessions import intake as intake_module
from fcil_server.sessions.inbox import Inbox
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.intake_pool.pool import PassedOn
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import ReceivedUpdate

SERVER, CLIENT = PrivateKeys.generate(), PrivateKeys.generate()
FED = FederationId("0" * 32)
CHUNK = 16 << 10
KEYS = {}  # content keys, by client
NAMES = [f"{n:05} {'x' * 90}" for n in range(2500)]  # 290 kB, with their counts


def inventory(client="a" * 26, names=NAMES):
    """Seal the list of classes of a client."""
    core = Core(
        protocol=PROTOCOL_VERSION, federation=FED, run="r20260102-030405-0a0b",
        direction="update", sender=client, sender_key=CLIENT.public.fingerprint,
        recipient="server", method="m", schema="", task=-1, round=0, kind=INVENTORY, base=0,
    )  # fmt: skip
    ones = np.ones(len(names), np.int64)
    plain = pack(Payload({"train": ones, "test": ones}, {"names": list(names)}))
    sealed, KEYS[client] = seal(plain, core, CLIENT, chunk_bytes=CHUNK)
    return sealed


class Server:
    """An intake, a clock that a test sets, and what it has sent and refused."""

    def __init__(self, tmp_path, credit=8 << 20):
        (tmp_path / "incoming").mkdir()
        self.now, self.sent, self.refused, self.announced = 0.0, [], [], []
        self.spool = Spool(tmp_path / "spool")
        self.intake = Intake(
            federation=FED, keys=SERVER, incoming=tmp_path / "incoming", spool=self.spool,
            credit=credit, max_payload_bytes=1 << 30, max_classes=10_000,
            ports=SimpleNamespace(
                recorded=lambda *_: False, is_here=lambda _: True, announced=self._announced,
                send=lambda peer, message: self.sent.append((peer, message)) or True,
                refused=lambda peer, error: self.refused.append((peer, error)),
            ),
            clock=lambda: self.now,
        )  # fmt: skip

    def _announced(self, peer, payload):
        self.announced.append((peer, payload.meta["names"]))

    async def offer(self, peer, sealed, unasked=0):
        wrap = wrap_key(KEYS[peer.client], sealed.header, SERVER.public)
        message = Update(digest=sealed.parsed.update_id, unasked=unasked)
        received = Received(message, b"", b"", (sealed.header, sealed.signature, wrap))
        self.intake.offer(peer, received, message)

    async def chunk(self, peer, sealed, index, data=None):
        message = Chunk(digest=sealed.parsed.update_id, index=index)
        blob = bytes(sealed.chunk(index)) if data is None else data
        self.intake.chunk(peer, Received(message, b"", b"", (blob,)), message)
        await self.intake.drain()

    def wanted(self):
        """Return the chunks that were asked for since the last call."""
        found = [i for _, m in self.sent if isinstance(m, Want) for i in m.chunks]
        self.sent.clear()
        return found


def peer(conn=1, client="a" * 26):
    channel = Channel(SERVER, CLIENT.public)
    return Peer(client, "c", CLIENT.public, b"r%d" % conn, conn, channel)


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    made.spool.close()


def play(story):
    asyncio.run(story())


def test_a_new_session_goes_on_at_the_missing_chunk_also_of_what_is_in_memory(server):
    async def story():
        sealed, first, second = inventory(), peer(1), peer(2)
        await server.offer(first, sealed, unasked=8)
        for index in range(6):
            await server.chunk(first, sealed, index)
        server.wanted()
        await server.offer(second, sealed)
        lacking = server.wanted()
        assert lacking[0] == 6
        for index in range(6, len(sealed.parsed.hashes)):
            await server.chunk(second, sealed, index)
        assert server.announced == [(second, NAMES)]
        assert any(isinstance(m, Ack) for p, m in server.sent if p is second)

    play(story)


def test_what_is_offered_twice_in_a_session_is_asked_for_once(server):
    async def story():
        sealed, one = inventory(), peer()
        await server.offer(one, sealed)
        assert server.wanted() == list(range(MIN_WINDOW_BYTES // CHUNK))
        await server.offer(one, sealed)
        assert server.wanted() == []

    play(story)


def test_a_client_that_says_what_it_sends_unasked_is_not_asked_for_that(server):
    async def story():
        sealed, one = inventory(), peer()
        await server.offer(one, sealed, unasked=10**6)
        assert server.wanted() == [], "no more than everybody may is believed, which is a window"
        for index in range(4):
            await server.chunk(one, sealed, index)
        assert server.wanted() == [8, 9, 10, 11]

    play(story)


def test_what_never_comes_is_asked_for_again(server):
    async def story():
        sealed, one = inventory(), peer()
        await server.offer(one, sealed)
        first = server.wanted()
        server.now = LOSS_TIMEOUT_S - 1
        server.intake.revive([one])
        assert server.wanted() == []
        server.now = LOSS_TIMEOUT_S
        server.intake.revive([one])
        assert server.wanted() == first

    play(story)


@pytest.mark.parametrize("how", ["refused", "offered again"])
def test_what_had_to_wait_for_room_is_asked_for_when_another_is_refused(server, how):
    async def story():
        one, first, second = peer(), inventory(), inventory(names=NAMES[1:])
        await server.offer(one, second)
        key = KEYS[one.client]
        server.intake.forget(one, second.parsed.update_id)
        await server.offer(one, first)
        KEYS[one.client] = key
        server.wanted()
        await server.offer(one, second)
        assert server.wanted() == [], "the first one fills the window"
        if how == "refused":
            server.intake.forget(one, first.parsed.update_id)
        else:
            one.receiver.end(first.parsed.update_id)
            await server.offer(one, second)
        assert server.wanted() == list(range(MIN_WINDOW_BYTES // CHUNK))

    play(story)


def test_a_damaged_file_of_the_server_is_its_disk_and_no_fault_of_the_client(
    server, tmp_path, monkeypatch
):
    """Told that its update is damaged, the client would drop it."""
    monkeypatch.setattr(partial_envelopes, "IN_MEMORY_BYTES", 1000)

    async def story():
        sealed, one = inventory(), peer()
        await server.offer(one, sealed)
        last = len(sealed.parsed.hashes) - 1
        for index in range(last):
            await server.chunk(one, sealed, index)
        message = Chunk(digest=sealed.parsed.update_id, index=last)
        blob = bytes(sealed.chunk(last))
        server.intake.chunk(one, Received(message, b"", b"", (blob,)), message)
        (file,) = (tmp_path / "incoming").iterdir()
        os.truncate(file, 5000)
        await server.intake.drain()
        assert [m.code for _, m in server.sent if isinstance(m, Nack)] == ["storage_failed"]

    play(story)


@pytest.mark.parametrize("times", [1, MAX_SPOILED, MAX_SPOILED + 1])
def test_a_chunk_that_does_not_fit_is_asked_for_again_and_each_time_written_down(server, times):
    async def story():
        sealed, one = inventory(), peer()
        await server.offer(one, sealed)
        spoilt = times
        while not server.announced:
            for index in server.wanted():
                spoil = index == 0 and spoilt > 0
                spoilt -= spoil
                await server.chunk(one, sealed, index, bytes(CHUNK) if spoil else None)
        assert len(server.refused) == times

    if times <= MAX_SPOILED:
        play(story)
    else:
        with pytest.raises(WireError, match="does not match its hash"):
            play(story)
        assert len(server.refused) == MAX_SPOILED


def test_many_clients_share_what_the_memory_may_hold(tmp_path):
    server = Server(tmp_path, credit=ASKED_BYTES)

    async def story():
        peers = [peer(n, chr(97 + n) * 26) for n in range(4)]
        sent = [inventory(one.client) for one in peers]
        for one, sealed in zip(peers, sent, strict=True):
            await server.offer(one, sealed)
        assert peers[0].receiver.pace.most_bytes == ASKED_BYTES
        await server.chunk(peers[0], sent[0], 0)
        assert peers[0].receiver.pace.most_bytes == ASKED_BYTES // 4

    play(story)
    server.spool.close()


def update_of(sealed, *indices):
    """Return an update as an intake process hands it over, with these chunks."""
    wrap = wrap_key(KEYS["a" * 26], sealed.header, SERVER.public)
    chunks = [bytes(sealed.chunk(index)) for index in indices]
    blobs = (sealed.header, sealed.signature, wrap, *chunks)
    return ReceivedUpdate(sealed.parsed.update_id, blobs)


def test_an_envelope_that_arrives_whole_is_opened_and_answered(server):
    async def story():
        sealed, one = inventory(), peer()
        server.intake.take_whole(one, update_of(sealed, *range(len(sealed.parsed.hashes))))
        await server.intake.has_room()
        await server.intake.drain()
        assert server.announced == [(one, NAMES)]
        assert [m.digest for _, m in server.sent] == [sealed.parsed.update_id]
        assert server.intake._whole_bytes == 0

    play(story)


def test_one_that_arrives_whole_again_is_answered_once_by_the_newest_session(server):
    async def story():
        sealed, first, second = inventory(), peer(1), peer(2)
        whole = update_of(sealed, *range(len(sealed.parsed.hashes)))
        server.intake.take_whole(first, whole)
        server.intake.take_whole(second, whole)
        await server.intake.drain()
        assert [p for p, m in server.sent if isinstance(m, Ack)] == [second]

    play(story)


def test_a_wrapped_key_of_another_length_is_refused_with_the_header(server):
    """It would stay in memory until the update has arrived, where nothing counts it."""

    async def story():
        sealed, one = inventory(), peer()
        message = Update(digest=sealed.parsed.update_id)
        blobs = (sealed.header, sealed.signature, bytes(2_000_000))
        with pytest.raises(WireError, match="wrapped key of 2000000 bytes, expected 1168"):
            server.intake.offer(one, Received(message, b"", b"", blobs), message)
        assert not server.sent

    play(story)


def test_one_that_arrives_whole_in_another_clients_name_is_refused(server):
    async def story():
        sealed = inventory("b" * 26)
        KEYS["a" * 26] = KEYS["b" * 26]
        with pytest.raises(WrongFederation):
            server.intake.take_whole(peer(), update_of(sealed, 0))

    play(story)


def test_no_message_is_read_while_too_many_arrive_whole(server, monkeypatch):
    monkeypatch.setattr(intake_module, "WHOLE_BYTES", 1)

    async def story():
        sealed, one = inventory(), peer()
        server.intake.take_whole(one, update_of(sealed, *range(len(sealed.parsed.hashes))))
        assert not server.announced
        await server.intake.has_room()
        assert server.announced

    play(story)


def test_of_an_update_that_an_intake_process_gave_up_the_other_chunks_are_asked_for_at_once(server):
    """Its client goes on with its connection, and hears nothing from the process any more."""

    async def story():
        sealed, one = inventory(), peer()
        one.ready = True
        inbox = Inbox(server.intake, alive=None, refuse=None, cut=None, most_bytes=1 << 20)
        context = SimpleNamespace(
            peers=SimpleNamespace(by_conn=lambda _: one), intake=server.intake
        )
        desk = SimpleNamespace(_context=context, _inbox=inbox)
        update = update_of(sealed, 0, 2)
        for goes_on in (False, True):
            passed = PassedOn(b"", 1, b"", update.blobs, chunks=(0, 2), goes_on=goes_on)
            Dispatch._take_update(desk, passed, update.digest)
            assert server.wanted()[:3] == ([1, 3, 4] if goes_on else [])

    play(story)


def test_chunks_that_came_before_a_connection_ended_are_not_asked_for_again(server):
    async def story():
        sealed, first, second = inventory(), peer(1), peer(2)
        server.intake.keep_partial(first, update_of(sealed, 0, 2), (0, 2))
        await server.offer(second, sealed)
        assert server.wanted()[:3] == [1, 3, 4]

    play(story)
