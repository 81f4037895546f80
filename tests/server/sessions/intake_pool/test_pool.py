"""Intake processes over real sockets: one server for their clients, whichever of them ends."""

import asyncio
import contextlib
import errno
import os
import signal
import socket

import pytest

from fcil_protocol.errors import PortInUse
from fcil_protocol.link.interface import LinkNews, SharedFrame
from fcil_protocol.link.zmq_link import Dealer
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.allow_list import AllowList
from fcil_server.sessions.intake_pool import pool as intake_pool
from fcil_server.sessions.intake_pool.pool import IntakePool

pytestmark = pytest.mark.processes
HOST = "127.0.0.1"
SERVER = PrivateKeys.generate()
LONG = 60.0  # heartbeats and retries that never come while a test runs


class Center:
    """A pool, and what it told."""

    def __init__(self, count, ends, allow=None):
        self.ends = ends  # closes the clients, and then the pool
        self.allow_list = AllowList(credit=1 << 20)
        self.notes, self.floods = [], []
        self.told = asyncio.Event()
        self.pool = IntakePool(
            count,
            curve_secret=SERVER.curve_secret,
            curve_public=SERVER.public.curve,
            allow_list=self.allow_list,
            heartbeat_s=LONG,
            credit=1 << 20,
            allow=allow or self.allow_list.allow,
            flooded=lambda key, why: self.floods.append((key, why)),
            notify=self.note,
        )
        ends.callback(self.pool.close)
        self.port = self.pool.bind(HOST, 0)

    def note(self, level, text):
        self.notes.append((level, text))
        self.told.set()

    def pids(self):
        return [process.child.pid for process in self.pool._processes if process.child]

    async def client(self, keys=None, retry_s=0.1):
        """Return a connected client whose key is on the list."""
        keys = keys or PrivateKeys.generate()
        self.allow_list.admit(keys.public.curve)
        dealer = self.dealer(keys, retry_s)
        news = LinkNews("")
        while news.state != "up":  # a list may come after the handshake
            news = await dealer.recv()
        return dealer

    def dealer(self, keys, retry_s=0.1):
        dealer = Dealer(
            curve_secret=keys.curve_secret,
            curve_public=keys.public.curve,
            server_key=SERVER.public.curve,
            heartbeat_s=LONG,
            retry_s=retry_s,
        )
        dealer.connect(HOST, self.port)
        self.ends.callback(dealer.close)
        return dealer

    async def hear(self, *frames):
        """Return the connection that this message comes from."""
        while True:
            incoming = await self.pool.recv()
            if incoming.frames == frames:
                return incoming


def play(story, count=2, **options):
    """Run ``async story(center)`` with a pool of so many processes."""

    async def limited():
        with contextlib.ExitStack() as ends:
            async with asyncio.timeout(60):
                await story(Center(count, ends, **options))

    asyncio.run(limited())


def test_messages_pass_both_ways_and_ends_are_told():
    async def story(center):
        dealers = [await center.client() for _ in range(6)]
        for number, dealer in enumerate(dealers):
            dealer.send([b"hello", b"%d" % number])
            incoming = await center.hear(b"hello", b"%d" % number)
            assert center.pool.send(incoming.route, [b"answer", b"%d" % number])
            assert await dealer.recv() == (b"answer", b"%d" % number)
        dealers[0].send([b"last", b""])
        heard = await center.hear(b"last", b"")
        dealers[0].close()
        gone = await center.pool.recv()
        assert (gone.conn, gone.key, gone.frames) == (heard.conn, heard.key, ())
        assert not center.pool.send(heard.route, [b"late"])
        center.pool.cut(incoming.conn)
        assert await dealers[-1].recv() == LinkNews("down")

    play(story)


@pytest.mark.full
def test_a_later_connection_has_a_higher_number_in_whichever_process():
    async def story(center):
        keys, before = PrivateKeys.generate(), 0
        processes = set()
        while len(processes) < 3:
            dealer = await center.client(keys)
            dealer.send([b"hello", b""])
            incoming = await center.hear(b"hello", b"")
            assert incoming.conn > before
            before = incoming.conn
            processes.add(center.pool._process_of(incoming.conn).index)
            dealer.close()

    play(story, count=3)


def test_a_killed_process_is_started_again_and_its_clients_come_back():
    async def story(center):
        dealers = [await center.client() for _ in range(6)]
        conns = {}
        for number, dealer in enumerate(dealers):
            dealer.send([b"hello", b"%d" % number])
            conns[(await center.hear(b"hello", b"%d" % number)).conn] = dealer
        killed = center.pool._process_of(next(iter(conns)))
        lost = {conn for conn in conns if center.pool._process_of(conn) is killed}
        their_clients = [conns[conn] for conn in lost]
        os.kill(killed.child.pid, signal.SIGKILL)
        while lost:
            gone = await center.pool.recv()
            assert not gone.frames
            lost.remove(gone.conn)  # no other connection is lost
        assert center.notes == [
            ("warning", f"intake process {killed.index + 1} ended; it is started again")
        ]
        for dealer in their_clients:
            for state in ("down", "up"):
                while (await dealer.recv()).state != state:
                    pass
        for number, dealer in enumerate(dealers):
            dealer.send([b"again", b"%d" % number])
            await center.hear(b"again", b"%d" % number)

    play(story)


@pytest.mark.full
def test_lists_reach_every_process_also_one_that_begins_later():
    async def story(center):
        keys = PrivateKeys.generate()
        await center.client(keys)
        await center.client()
        center.allow_list.forget(keys.public.curve)
        for pid in center.pids():
            os.kill(pid, signal.SIGKILL)
        stranger = center.dealer(keys)
        news = await stranger.recv()
        while news == LinkNews("down", "unreachable"):
            news = await stranger.recv()
        assert news == LinkNews("refused", "unknown_client")
        await center.client()  # admitted after the start

    play(story)


def test_a_frame_for_many_crosses_to_a_process_once():
    async def story(center):
        dealers = [await center.client() for _ in range(4)]
        routes = []
        for dealer in dealers:
            dealer.send([b"hello", b""])
            routes.append((await center.hear(b"hello", b"")).route)
        shared = SharedFrame(os.urandom(200_000))
        (process,) = center.pool._processes
        before = process.pipe.waiting_bytes
        for route in routes:
            center.pool.send(route, [b"part", shared])
        assert process.pipe.waiting_bytes - before < 201_000
        for dealer in dealers:
            assert await dealer.recv() == (b"part", bytes(shared))

    play(story, count=1)


def test_the_kernels_counts_of_all_processes_are_there_once_settled():
    async def story(center):
        dealers = [await center.client() for _ in range(4)]
        conns = []
        for dealer in dealers:
            dealer.send([b"hello", bytes(50_000)])
            conns.append((await center.hear(b"hello", bytes(50_000))).conn)
        await center.pool.settle_counts()
        received = dict.fromkeys(conns, 0)
        for some in center.pool.take_counts():
            for conn, counts in some.items():
                received[conn] = received.get(conn, 0) + counts.received
        assert all(received[conn] > 50_000 for conn in conns)

    play(story)


@pytest.mark.full
def test_a_process_that_does_not_answer_is_killed(monkeypatch):
    monkeypatch.setattr(intake_pool, "ASK_S", 0.01)
    monkeypatch.setattr(intake_pool, "MOST_UNANSWERED", 1 << 30)

    async def story(center):
        await center.client()
        (first,) = center.pids()
        os.kill(first, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(intake_pool, "MOST_UNANSWERED", 0)
            await center.told.wait()
        await center.client()  # of the next one
        assert center.pids() != [first]
        assert center.notes[0] == ("warning", "intake process 1 does not answer")

    play(story, count=1)


@pytest.mark.full
def test_more_unread_bytes_are_allowed_to_a_relay_and_not_to_others():
    relay, other = PrivateKeys.generate(), PrivateKeys.generate()

    def allow(key):
        return 64 << 20 if key == relay.public.curve else 6 << 20

    async def story(center):
        message = [b"much", bytes(1 << 20)]
        for keys, cut in ((relay, False), (other, True)):
            dealer = await center.client(keys)
            dealer.send([b"hello", b""])
            await center.hear(b"hello", b"")
            sent = 0  # until what the pool, its pipe and the system hold is far exceeded
            while sent < 60 and dealer.send(message):
                sent += 1
            if cut:
                while (await dealer.recv()).state != "down":
                    pass
                while (await center.pool.recv()).frames:
                    pass
            else:
                for _ in range(sent):
                    await center.hear(*message)
        assert [key for key, _ in center.floods] == [other.public.curve]

    play(story, count=1, allow=allow)


@pytest.mark.parametrize("lacks", ["a program", "a descriptor"])
def test_a_process_that_cannot_be_started_is_tried_again_after_a_while(monkeypatch, lacks):
    pauses = []

    def no_descriptor():
        raise OSError(errno.EMFILE, "too many open files")

    async def story(center):
        await center.client()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda pause, *_: pauses.append(pause))
        if lacks == "a program":
            monkeypatch.setattr(intake_pool, "module_command", lambda *_: ["/nowhere"])
        else:
            monkeypatch.setattr(socket, "socketpair", no_descriptor)
        (process,) = center.pool._processes
        process.ends = 0
        for _ in range(4):
            center.pool._start(process)

    play(story, count=1)
    assert pauses == [0.0, 0.2, 1.0, 5.0]


@pytest.mark.full
def test_a_port_in_use_is_refused_and_nothing_is_left_running():
    async def story(center):
        with pytest.raises(PortInUse):
            center.pool.__class__(
                1, curve_secret=SERVER.curve_secret, curve_public=SERVER.public.curve,
                allow_list=AllowList(), heartbeat_s=LONG, credit=0, allow=lambda _: 0,
                flooded=lambda *_: None, notify=lambda *_: None,
            ).bind(HOST, center.port)  # fmt: skip
        pids = center.pids()
        center.pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        Center(1, center.ends)

    play(story)
