"""Floods, junk and silence against a real server; two honest clients learn on meanwhile.

Bounds are several times what was measured (docs/benchmarks/attacks.md), and far below what an
attack costs a server without the limit that is tried (PROTOCOL.md 2.2).
"""

import asyncio
import contextlib
import os
import socket

import numpy as np
import pytest

import fcil_protocol
from fcil_protocol.envelopes.transfer import MAX_SPOILED
from fcil_protocol.link.zmq_link import MAX_MESSAGE_BYTES, LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import (
    Ack,
    Chunk,
    Hello,
    Nack,
    Parts,
    RoundClosed,
    RoundOpen,
    Update,
    Want,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload
from fcil_server.lab.local.federation import LocalFederation
from system.raw_client import WAIT_S, RawClient, good_update
from system.siege import Siege

pytestmark = pytest.mark.processes

MORE_MB = 40  # memory that an attack may cost; honest rounds alone cost 2
MORE_FILES = 8  # descriptors that may be open in passing
WINDOW = 100  # messages between two waits, within what a socket's queue takes
# A peer of ZMTP 3.1 that will speak CURVE: what everybody may send before anybody asks.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.fixture(
    scope="module",
    params=[0, pytest.param(2, marks=pytest.mark.full)],
    ids=["one process", "two intake processes"],
)
def siege(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("siege")
    with LocalFederation(folder) as federation:
        yield Siege(federation, folder, federation__intake=request.param)


@pytest.fixture
def endure(siege):
    """Carry out an attack; check that the server is as it was."""

    def run(attack):
        before = siege.facts()
        asyncio.run(attack())
        after = siege.facts()
        assert after.peak - before.peak < MORE_MB
        assert siege.until_files(before.files + MORE_FILES) <= before.files + MORE_FILES
        assert "Traceback" not in siege.federation.log("server").read_text()
        return after

    return run


# --- strangers ------------------------------------------------------------------------------


def connect(siege):
    return socket.create_connection(("127.0.0.1", siege.federation.port), timeout=WAIT_S)


def test_three_hundred_junk_connections(siege, endure):
    def junk():
        for number in range(300):
            with connect(siege) as sock, contextlib.suppress(OSError):
                sock.sendall(GREETING[: number % 65] + os.urandom(300))

    async def attack():
        async for _ in siege.passes():
            await asyncio.to_thread(junk)

    endure(attack)


@pytest.mark.full
def test_connections_that_speak_slowly_or_never_are_closed_by_the_server(siege, endure):
    async def attack():
        opening = (asyncio.open_connection("127.0.0.1", siege.federation.port) for _ in range(200))
        links = await asyncio.gather(*opening)
        ends = asyncio.gather(*(reader.read() for reader, _ in links))  # until the server closes
        said = 0
        async for _ in siege.passes():
            while not ends.done():  # half of them say another byte with every update that comes
                for _, writer in links[::2]:
                    writer.write(GREETING[said : said + 1])
                said += 1
                await siege.next_update()
        await ends
        for _, writer in links:
            writer.close()

    endure(attack)


@pytest.mark.full
def test_a_frame_that_a_stranger_announces_is_not_waited_for(siege, endure):
    def push():
        """Announce 8 GiB before the handshake; return how many bytes were taken."""
        taken = 0
        with connect(siege) as sock, contextlib.suppress(OSError):
            sock.sendall(GREETING + b"\x06" + (8 << 30).to_bytes(8, "big"))
            while taken < 256 << 20:
                taken += sock.send(bytes(1 << 20))
        return taken

    async def attack():
        async for _ in siege.passes():
            assert await asyncio.to_thread(push) < 64 << 20  # what kernels buffer at most

    endure(attack)


# --- enrolled clients -----------------------------------------------------------------------


class Flooder(RawClient):
    """An enrolled client that sends more than it should. `order` is the newest it was given."""

    async def begin(self):
        await self.connect()
        await self.greet()
        return self

    async def next_answer(self):
        """Return the next message that is no news of rounds."""
        while True:
            frames = await asyncio.wait_for(self.link.recv(), WAIT_S)
            message = None if isinstance(frames, LinkNews) else parse(frames).message
            if isinstance(message, RoundOpen):
                self.order = message
            elif message is not None and not isinstance(message, RoundClosed):
                return message

    async def settled(self):
        """Wait until the server has taken all that was sent; return the answers that came."""
        answers = []
        mark = os.urandom(32).hex()
        self.say(Want(digest=mark, chunks=[]))
        while True:
            message = await self.next_answer()
            if isinstance(message, Nack) and message.digest == mark:
                return answers
            answers.append(message)

    async def pour(self, messages, refused=0):
        """Send messages (lists of frames) without a care for credit; return all answers.

        They are numbered when they are sent: hand over a generator. What is complete is opened
        beside what is taken, so as many refusals as must come are waited for.
        """
        answers = []
        for number, frames in enumerate(messages, start=1):
            assert self.link.send(frames)
            if number % WINDOW == 0:
                answers += await self.settled()
        answers += await self.settled()
        while sum(isinstance(a, Nack) for a in answers) < refused:
            answers.append(await self.next_answer())
        return answers


def test_messages_that_are_none_are_counted_and_answered(siege, endure):
    async def attack():
        async for number in siege.passes():  # another one each time: 600 are borne of each
            client = await Flooder(siege.federation, f"junk-{number}").begin()
            junk = [[os.urandom(60)] * (1 + n % 6) for n in range(300)]
            before = siege.refused()
            answers = await client.pour(junk)
            assert {a.code for a in answers} == {"malformed"}
            assert len(answers) == len(junk)
            marks = len(junk) // WINDOW + 1  # each wait is itself a refused Want
            assert siege.refused() - before == len(junk) + marks
            assert siege.refusals(client.client)["malformed"]
            client.close()

    endure(attack)


@pytest.mark.full
def test_frames_beyond_the_limit_end_their_senders_connection(siege, endure):
    async def attack():
        client = await Flooder(siege.federation, "oversize").begin()
        async for _ in siege.passes():
            client.link.send([bytes(MAX_MESSAGE_BYTES + 1)])
            for state in ("down", "up"):
                while await asyncio.wait_for(client.link.recv(), WAIT_S) != LinkNews(state):
                    pass
        assert (await client.greet()).ready  # it is let in again
        client.close()

    endure(attack)


@pytest.mark.full
def test_a_flood_of_hellos_is_one_session_at_a_time(siege, endure):
    async def attack():
        async for number in siege.passes():  # another one each time: 600 are borne of each
            client = await Flooder(siege.federation, f"hellos-{number}").begin()
            answers = []
            for _ in range(200):
                client.channel = Channel(client.keys, client.server)
                client.say(
                    Hello(
                        nonce=client.channel.nonce, protocol=fcil_protocol.PROTOCOL_VERSION,
                        oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION, package="", device="x" * 128,
                        federation=client.certificate.federation, client=client.client,
                        methods=["running_mean==1"] * 200, takes_compact=True,
                    )
                )  # fmt: skip
                answers.append(await asyncio.wait_for(client.link.recv(), WAIT_S))
            assert {parse(frames).message.type for frames in answers} == {"welcome"}
            client.close()

    endure(attack)


@pytest.mark.full
def test_wants_for_the_same_chunk_a_thousand_times_get_it_once(siege, endure):
    async def attack():
        async for number in siege.passes():  # another one each time: 600 are borne of each
            client = await Flooder(siege.federation, f"wants-{number}").begin()
            assert isinstance(await client.announce({"0": 1}), Ack)
            order = await client.asked()
            digest = next(p.digest for p in order.parts if p.name == "registry")
            before = siege.refused()
            greedy = Want(digest=digest, chunks=[0] * 1024, header=True)
            answers = await client.pour(client.frames(greedy) for _ in range(20))
            assert [type(a) for a in answers] == [Parts, Chunk] * 20
            beyond = (Want(digest=digest, chunks=[n]) for n in range(1, 200))
            answers = await client.pour(client.frames(want) for want in beyond)
            assert {(type(a), a.digest) for a in answers} == {(Nack, digest)}
            assert len(answers) == 199
            assert siege.refused() - before >= 199
            assert siege.refusals(client.client)["malformed"]
            client.close()

    endure(attack)


@pytest.mark.full
def test_chunks_that_nobody_asked_for_are_dropped_or_stored_once(siege, endure):
    """All chunks of a large envelope at once, each twice, among chunks of no envelope."""

    async def attack():
        client = await Flooder(siege.federation, "chunks").begin()
        core = client.core(INVENTORY)
        async for _ in siege.passes():
            sealed, wrap = client.sealed(bytes(8) + os.urandom(3 << 20), core)
            digest = sealed.parsed.update_id
            client.say(Update(digest=digest), sealed.header, sealed.signature, wrap)
            flood = []
            for index in range(len(sealed.parsed.hashes)):
                chunk = client.frames(Chunk(digest=digest, index=index), bytes(sealed.chunk(index)))
                flood += [chunk, chunk, client.frames(Chunk(digest="5" * 64, index=index), b"x")]
            answers = await client.pour(flood, refused=1)  # chunks have no numbers
            (nack,) = (a for a in answers if isinstance(a, Nack))
            assert (nack.digest, nack.code) == (digest, "malformed")  # it held no payload
        client.close()

    endure(attack)
    siege.until_nothing_incoming()  # a refusal leaves before its file is removed


@pytest.mark.full
def test_envelopes_that_are_begun_and_left_lie_do_not_fill_the_disk(siege, endure):
    async def attack():
        client = await Flooder(siege.federation, "beginner").begin()
        core = client.core(INVENTORY)
        async for _ in siege.passes():
            await client.greet()  # a new session knows nothing of the envelopes of the last
            for _ in range(10):
                sealed, wrap = client.sealed(os.urandom(3 << 20), core)
                client.say(
                    Update(digest=sealed.parsed.update_id), sealed.header, sealed.signature, wrap
                )
            await client.settled()
        client.close()

    assert endure(attack).incoming < 20  # four envelopes
    siege.until_nothing_incoming()


# --- updates --------------------------------------------------------------------------------


def tensors(order, **changes):
    made = {k: v for k, v in good_update(order).items() if k != "classes"} | changes
    return Payload({k: v for k, v in made.items() if v is not None})


def spoilt(order):
    """Return payloads that the schema of the round does not allow, or that are none."""
    return [
        tensors(order, mean=np.full((2, 64), np.nan, np.float32)),
        tensors(order, mean=np.zeros((3, 64), np.float32)),
        tensors(order, mean=np.full((2, 64), 1e30, np.float32)),
        tensors(order, image=np.zeros((2, 8), np.float32)),
        tensors(order, count=None),
        tensors(order, n=np.array([99], np.int64)),
        b"",
        os.urandom(200),
    ]


def bad_updates(client, count):
    """Yield the frames of updates that must each be refused once, header and chunk apart."""
    order = client.order
    core, late = client.update_core(order), client.update_core(order, base=order.base + 7)
    payloads = spoilt(order)
    for number in range(count):
        sealed, wrap = client.sealed(payloads[number % 8], late if number % 9 == 8 else core)
        header, signature, body = sealed.header, sealed.signature, sealed.body
        match number % 10:
            case 6:
                signature = os.urandom(64)
            case 7:
                wrap = os.urandom(len(wrap))
            case 8:
                body = os.urandom(len(body))
            case 9:
                header = header[:-1]
        digest = sealed.parsed.update_id
        yield client.frames(Update(digest=digest, unasked=1), header, signature, wrap)
        for _ in range(1 + MAX_SPOILED * is_spoilt(number)):  # asked for again so often
            yield client.frames(Chunk(digest=digest, index=0), body)


def is_spoilt(number):
    """Whether a bad update is one whose chunk does not fit, after a header that is good."""
    return number % 10 == 8 and number % 9 != 8


async def spoiler(siege, number):
    """Return a new client that was asked for an update; 600 refusals are borne of each."""
    client = await Flooder(siege.federation, f"spoiler-{number}").begin()
    assert isinstance(await client.announce({"0": 1, "1": 1}), Ack)
    client.order = await client.asked()
    return client


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.full
def test_bad_updates_are_refused_one_by_one_with_a_reason(siege, endure, count):
    each, turn = WINDOW // 2, 250

    async def attack():
        async for number in siege.passes():
            before, marks = siege.refused(), 0
            for start in range(0, count, turn):
                client = await spoiler(siege, f"{count}-{number}-{start}")
                for _ in range(start, min(count, start + turn), each):
                    answers = await client.pour(bad_updates(client, each), refused=each)
                    marks += 2  # each wait is itself a refused Want
                    again = [a for a in answers if isinstance(a, Want)]
                    assert len(again) <= MAX_SPOILED * sum(map(is_spoilt, range(each)))
                    marks += len(again)  # for each a chunk was refused
                    answers = [a for a in answers if not isinstance(a, Want)]
                    assert len(answers) == each
                    assert all(isinstance(a, Nack) and a.text for a in answers)
                codes = siege.refusals(client.client)
                assert codes.keys() >= {"schema_mismatch", "bad_signature", "malformed"}
                client.close()
            assert siege.refused() - before == count + marks

    endure(attack)
