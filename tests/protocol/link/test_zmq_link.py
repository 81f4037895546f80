"""The link over real sockets: who gets in, what is seen of whom, what every frame costs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import zmq
from zmq.utils.garbage import gc as in_place

from fcil_protocol.errors import LinkError, PortInUse
from fcil_protocol.link import zmq_link
from fcil_protocol.link.interface import COME_AGAIN, ComeAgain, SharedFrame, SharedFrames
from fcil_protocol.link.socket_reader import MAX_FRAMES
from fcil_protocol.link.zmq_link import (
    HANDSHAKE_DOWN_BYTES,
    HANDSHAKE_UP_BYTES,
    Dealer,
    Incoming,
    LinkNews,
    Links,
    Router,
    frame_wire_bytes,
    wire_bytes,
)
from fcil_protocol.trust.keys import PrivateKeys

HOST = "127.0.0.1"
LONG = 60.0  # heartbeats and retries that never come while a test runs
SERVER, ALICE, BOB, STRANGER = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2, 3, 4)
)
KNOWN = {ALICE.public.curve, BOB.public.curve}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def server(
    admit: Callable[[bytes], bool] = KNOWN.__contains__,
    **options: Any,
) -> AsyncIterator[tuple[Router, int]]:
    router = Router(
        curve_secret=SERVER.curve_secret,
        curve_public=SERVER.public.curve,
        admit=admit,
        heartbeat_s=LONG,
        **options,
    )
    try:
        yield router, router.bind(HOST, 0)
    finally:
        router.close()


@contextlib.asynccontextmanager
async def client(
    port: int,
    keys: PrivateKeys = ALICE,
    *,
    server_key: bytes = SERVER.public.curve,
    retry_s: float = LONG,
    links: Links | None = None,
) -> AsyncIterator[Dealer]:
    dealer = Dealer(
        curve_secret=keys.curve_secret,
        curve_public=keys.public.curve,
        server_key=server_key,
        heartbeat_s=LONG,
        retry_s=retry_s,
        links=links,
    )
    try:
        dealer.connect(HOST, port)
        yield dealer
    finally:
        dealer.close()


async def news(dealer: Dealer) -> LinkNews:
    item = await asyncio.wait_for(dealer.recv(), 60)
    assert isinstance(item, LinkNews), item
    return item


async def up(dealer: Dealer) -> None:
    assert await news(dealer) == LinkNews("up")


async def heard(router: Router) -> Incoming:
    return await asyncio.wait_for(router.recv(), 60)


async def echo(router: Router, dealer: Dealer, text: bytes) -> Incoming:
    """Send there and back; returns what the server saw."""
    assert dealer.send([text])
    got = await heard(router)
    assert got.frames == (text,)
    assert router.send(got.route, [b"re:" + text])
    assert await asyncio.wait_for(dealer.recv(), 60) == (b"re:" + text,)
    return got


# --- who gets in ----------------------------------------------------------------------------


def test_an_admitted_client_is_heard_under_its_key_and_gets_an_answer() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            got = await echo(router, alice, b"hello")
            assert got.key == ALICE.public.curve

    run(test)


def test_a_message_keeps_its_frames_empty_ones_too() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            frames = [b"body", b"", b"x" * 70_000]
            alice.send(frames)
            got = await heard(router)
            assert got.frames == tuple(frames)
            router.send(got.route, frames)
            assert await alice.recv() == tuple(frames)

    run(test)


def test_a_frame_for_many_peers_is_held_once_and_goes_with_its_last_message() -> None:
    def part(number: int) -> SharedFrame:
        return SharedFrame(bytes([number]) * 100_000)

    async def test() -> None:
        frames = SharedFrames[int](1 << 20)  # ten of them
        before = set(in_place.refs)  # of other tests
        async with server() as (router, port), client(port) as alice, client(port) as again:
            gc.disable()
            try:
                for dealer in (alice, again):
                    await up(dealer)
                    dealer.allow(8 << 20)  # it reads once all is sent
                    dealer.send([b"here"])
                    got = await heard(router)
                    for number in range(20):
                        frame = frames.use(number) or frames.keep(number, part(number))
                        assert router.send(got.route, [b"head", frame])
                        message = frame.message
                        assert router.send(got.route, [frame])
                        assert frame.message is message is not None
                del frames, frame, message
                for dealer in (alice, again):
                    for number in range(20):
                        assert await dealer.recv() == (b"head", part(number))
                        assert await dealer.recv() == (part(number),)
                while set(in_place.refs) - before:  # what pyzmq holds; else it never ends
                    await echo(router, alice, b"any more?")
            finally:
                gc.enable()

    run(test)


def test_a_stranger_hears_that_it_is_refused_and_nothing_of_it_gets_through() -> None:
    async def test() -> None:
        async with (
            server() as (router, port),
            client(port, STRANGER) as stranger,
            client(port, ALICE) as alice,
        ):
            assert await news(stranger) == LinkNews("refused", "unknown_client")
            assert not stranger.send([b"let me in"])
            await up(alice)
            assert (await echo(router, alice, b"me")).key == ALICE.public.curve
            while router.refused_handshakes < 1:  # the gate's thread counts it when it likes
                await echo(router, alice, b"me again")

    run(test)


def test_a_refused_client_gets_in_by_itself_once_it_is_enrolled() -> None:
    async def test() -> None:
        allowed: set[bytes] = set()
        async with (
            server(allowed.__contains__) as (router, port),
            client(port, retry_s=0.01) as alice,
        ):
            assert (await news(alice)).state == "refused"
            allowed.add(ALICE.public.curve)
            while (said := await news(alice)).state != "up":
                assert said.state == "refused"
            await echo(router, alice, b"at last")

    run(test)


def test_who_may_come_later_hears_so_and_gets_in_then() -> None:
    async def test() -> None:
        room: set[bytes] = set()

        def admit(key: bytes) -> bool:
            if key not in room:
                raise ComeAgain
            return True

        async with server(admit) as (router, port), client(port, retry_s=0.01) as alice:
            assert await news(alice) == LinkNews("refused", COME_AGAIN)
            room.add(ALICE.public.curve)
            while (said := await news(alice)).state != "up":
                assert said == LinkNews("refused", COME_AGAIN)
            await echo(router, alice, b"at last")

    run(test)


def test_a_gate_that_cannot_decide_stays_shut() -> None:
    async def test() -> None:
        def broken(key: bytes) -> bool:
            raise RuntimeError("no database")

        async with server(broken) as (_, port), client(port) as alice:
            assert await news(alice) == LinkNews("refused", "unknown_client")

    run(test)


def test_a_client_with_another_servers_key_is_told_and_sends_nothing() -> None:
    async def test() -> None:
        async with server() as (_, port), client(port, server_key=BOB.public.curve) as alice:
            assert await news(alice) == LinkNews("refused", "wrong_server_key")
            assert not alice.send([b"secret"])

    run(test)


def test_nobody_answers_is_told_as_unreachable() -> None:
    async def test() -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        async with client(port) as alice:
            assert await news(alice) == LinkNews("down", "unreachable")
            assert not alice.send([b"anybody?"])

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel drops no SYN packets: Linux does")
def test_a_host_that_drops_all_packets_is_unreachable_before_the_kernel_gives_up(
    monkeypatch,
) -> None:
    """A full backlog drops SYN packets, as a host without power does."""
    monkeypatch.setattr(zmq_link, "CONNECT_MS", 200)

    async def test() -> None:
        with socket.create_server((HOST, 0), backlog=0) as full, contextlib.ExitStack() as stack:
            for _ in range(3):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            async with client(full.getsockname()[1]) as alice:
                assert await news(alice) == LinkNews("down", "unreachable")

    run(test)


def raw_dealer(context: zmq.Context, keys: PrivateKeys | None) -> zmq.Socket:
    """A client that obeys nobody: plain libzmq."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.curve_secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.curve)
        sock.setsockopt(zmq.CURVE_SERVERKEY, SERVER.public.curve)
    return sock


def test_a_client_without_curve_and_garbage_do_not_disturb_a_legitimate_one() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            context = zmq.Context()
            null = raw_dealer(context, None)
            null.connect(f"tcp://{HOST}:{port}")
            null.send(b"no key at all")
            streams = []
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"\xff" * 5000, b""):
                stream = socket.create_connection((HOST, port))
                stream.setblocking(False)
                await loop.sock_sendall(stream, garbage)
                streams.append(stream)
            for number in range(20):
                await echo(router, alice, b"%d" % number)
            for stream in streams:
                stream.close()
            null.close(0)
            context.term()
            await echo(router, alice, b"still here")

    run(test)


def test_the_key_is_the_true_one_whatever_routing_id_a_client_gives_itself() -> None:
    """Bob takes Alice's route for his own name: he is still Bob, and she still hears."""

    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            first = await echo(router, alice, b"a")
            context = zmq.Context()
            taken, own = raw_dealer(context, BOB), raw_dealer(context, BOB)
            taken.setsockopt(zmq.ROUTING_ID, first.route)
            own.setsockopt(zmq.ROUTING_ID, b"alice")
            for sock in (taken, own):
                sock.connect(f"tcp://{HOST}:{port}")
                sock.send(b"I am Alice")
            got = await heard(router)
            assert (got.key, got.route) == (BOB.public.curve, b"alice")
            await echo(router, alice, b"only mine")
            for sock in (taken, own):
                assert not sock.poll(0)
                sock.close(0)
            context.term()

    run(test)


def test_two_connections_of_one_key_are_told_apart() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as one, client(port) as two:
            await up(one)
            await up(two)
            first, second = await echo(router, one, b"1"), await echo(router, two, b"2")
            assert first.key == second.key
            assert first.conn != second.conn
            assert first.route != second.route

    run(test)


# --- coming and going -----------------------------------------------------------------------


def test_a_departed_peer_is_reported_once_and_cannot_be_sent_to() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port, BOB) as bob:
            await up(bob)
            async with client(port) as alice:
                await up(alice)
                got = await echo(router, alice, b"a")
            gone = await heard(router)
            assert gone == Incoming(got.route, got.conn, got.key)
            # libzmq says so a moment before it takes the route away.
            while router.send(got.route, [b"too late"]):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert (await echo(router, bob, b"b")).key == BOB.public.curve

    run(test)


@pytest.mark.parametrize("count", [1, 40, 150])
def test_a_peer_that_speaks_and_goes_at_once_is_heard_first_and_reported_gone_last(
    count: int,
) -> None:
    """Also when more had come than is read ahead: nothing of it comes after its end."""

    async def test() -> None:
        async with server() as (router, port), client(port, BOB) as bob:
            context = zmq.Context()
            quick = raw_dealer(context, ALICE)
            quick.setsockopt(zmq.LINGER, 10_000)
            quick.connect(f"tcp://{HOST}:{port}")
            for number in range(count):
                quick.send(b"%d" % number)
            quick.close()
            await asyncio.to_thread(context.term)  # returns when everything is in the kernel
            await up(bob)
            assert bob.send([b"bob"])
            seen = [await heard(router) for _ in range(count + 2)]
            alice = [i.frames for i in seen if i.key == ALICE.public.curve]
            assert alice == [*((b"%d" % number,) for number in range(count)), ()]

    run(test)


def test_connections_that_come_and_go_on_the_same_descriptor_are_all_reported() -> None:
    """The system gives the number of a closed connection to the next one."""

    async def test() -> None:
        async with server() as (router, port):
            open_now: set[int] = set()
            for number in range(30):
                async with client(port) as alice:
                    await up(alice)
                    assert alice.send([b"%d" % number])
                    while (got := await heard(router)).frames != (b"%d" % number,):
                        open_now.remove(got.conn)
                    assert got.conn not in open_now
                    open_now.add(got.conn)
            while open_now:
                got = await heard(router)
                assert got.frames == ()
                open_now.remove(got.conn)

    run(test)


def test_cut_ends_a_connection_and_the_client_comes_back_by_itself() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice, client(port, BOB) as bob:
            await up(alice)
            await up(bob)
            first, other = await echo(router, alice, b"1"), await echo(router, bob, b"b")
            router.cut(first.conn)
            assert await news(alice) == LinkNews("down")
            assert await heard(router) == Incoming(first.route, first.conn, first.key)
            await up(alice)
            second = await echo(router, alice, b"2")
            assert second.conn != first.conn
            assert (await echo(router, bob, b"c")).conn == other.conn, "the wrong one was cut"

    run(test)


def test_cutting_a_connection_that_is_gone_does_nothing() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            got = await echo(router, alice, b"1")
            router.cut(got.conn + 1000)
            await echo(router, alice, b"2")

    run(test)


def test_a_key_that_was_struck_off_cannot_come_back_after_the_cut() -> None:
    async def test() -> None:
        allowed = set(KNOWN)
        async with server(allowed.__contains__) as (router, port), client(port) as alice:
            await up(alice)
            got = await echo(router, alice, b"1")
            allowed.discard(ALICE.public.curve)
            router.cut(got.conn)
            assert await news(alice) == LinkNews("down")
            assert await news(alice) == LinkNews("refused", "unknown_client")

    run(test)


def test_a_client_finds_a_server_that_starts_later_and_one_that_was_restarted() -> None:
    async def test() -> None:
        async with server() as (_, port):
            pass  # a port that is free again
        async with client(port) as alice:
            assert (await news(alice)).state == "down"
            for text in (b"first", b"second"):
                router = Router(
                    curve_secret=SERVER.curve_secret,
                    curve_public=SERVER.public.curve,
                    admit=KNOWN.__contains__,
                    heartbeat_s=LONG,
                )
                try:
                    router.bind(HOST, port)
                    while (await news(alice)).state != "up":
                        pass
                    await echo(router, alice, text)
                finally:
                    router.close()
                assert (await news(alice)).state == "down"

    run(test)


def test_the_first_message_after_the_link_is_up_is_always_taken() -> None:
    """However often somebody tried in vain just before: libzmq looks for news only rarely."""

    async def test() -> None:
        async with server() as (router, port):
            for _ in range(5):
                async with client(port) as alice:
                    said = asyncio.ensure_future(alice.recv())
                    while not said.done():
                        alice.send([b"early"])
                        await asyncio.sleep(0)
                    assert said.result() == LinkNews("up")
                    assert alice.send([b"now"])
                    while (await heard(router)).frames != (b"now",):
                        pass

    run(test)


# --- reading --------------------------------------------------------------------------------


def test_sending_never_hides_a_message_that_has_come() -> None:
    """Every call on a libzmq socket may swallow the signal that there is something to read."""

    async def test() -> None:
        async with server() as (router, port), client(port) as alice, client(port, BOB) as bob:
            await up(alice)
            await up(bob)
            alice.allow(1 << 30)  # she is sent much, and reads nothing
            route = (await echo(router, alice, b"a")).route
            clock = asyncio.get_running_loop().time
            for number in range(150):
                assert bob.send([b"%d" % number])
                until = clock() + 0.0005 * (number % 4)
                while clock() < until:  # busy sending, as a server is; no turn for the loop
                    router.send(route, [b"y"])
                got = await heard(router)
                assert got.frames == (b"%d" % number,)

    run(test)


def test_messages_wait_in_order_while_nobody_reads() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            sent = 0
            while sent < 1000:
                if alice.send([b"%d" % sent]):
                    sent += 1
                else:
                    await asyncio.sleep(0)  # its queue is full until the loop has had a turn
                    got = await heard(router)
                    assert got.frames == (b"0",)
                    break
            rest = [(await heard(router)).frames for _ in range(sent - (sent < 1000))]
            first = 1 if sent < 1000 else 0
            assert rest == [(b"%d" % n,) for n in range(first, sent)]

    run(test)


def test_a_flood_leaves_other_tasks_their_turn() -> None:
    """A task that only yields runs while messages pour in."""

    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.ensure_future(other())
            received = 0
            for number in range(2000):
                while not alice.send([b"%d" % number]):
                    assert (await heard(router)).frames == (b"%d" % received,)
                    received += 1
            before = turns
            for expected in range(received, 2000):
                assert (await heard(router)).frames == (b"%d" % expected,)
            assert turns - before >= (2000 - received) // 200
            task.cancel()

    run(test)


def test_a_peer_that_does_not_read_is_told_by_false_and_costs_a_bounded_queue() -> None:
    async def test() -> None:
        async with server() as (router, port):
            context = zmq.Context()
            lazy = raw_dealer(context, ALICE)
            lazy.setsockopt(zmq.RCVHWM, 1)
            lazy.setsockopt(zmq.RCVBUF, 4096)
            lazy.connect(f"tcp://{HOST}:{port}")
            lazy.send(b"hello")
            route = (await heard(router)).route
            sent = 0
            while router.send(route, [bytes(100_000)]):
                sent += 1
                assert sent < 5000, "the queue has no bound"
            assert sent >= zmq_link.HIGH_WATER
            lazy.close(0)
            context.term()
            gone = await heard(router)
            assert (gone.frames, gone.key) == ((), ALICE.public.curve)

    run(test)


def test_sending_to_a_route_that_never_was_returns_false() -> None:
    async def test() -> None:
        async with server() as (router, _):
            assert not router.send(b"nobody", [b"hello?"])

    run(test)


def test_an_oversize_frame_ends_its_senders_connection_and_nothing_else() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice, client(port, BOB) as bob:
            await up(alice)
            await up(bob)
            before = await echo(router, alice, b"1")
            kept = await echo(router, bob, b"b")
            assert alice.send([bytes(zmq_link.MAX_MESSAGE_BYTES)])  # 33 bytes too many
            assert await news(alice) == LinkNews("down")
            gone = await heard(router)
            assert (gone.conn, gone.frames) == (before.conn, ())
            assert (await echo(router, bob, b"c")).conn == kept.conn
            await up(alice)
            await echo(router, alice, b"2")

    run(test)


def test_the_largest_frame_that_is_allowed_passes() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            await echo(router, alice, b"a first word is short")
            assert alice.send([bytes(zmq_link.MAX_MESSAGE_BYTES - 33)])
            assert len((await heard(router)).frames[0]) == zmq_link.MAX_MESSAGE_BYTES - 33

    run(test)


def test_a_message_of_too_many_frames_ends_its_senders_connection_and_nothing_else() -> None:
    async def test() -> None:
        told: list[bytes] = []
        async with (
            server(flooded=lambda key, _: told.append(key)) as (router, port),
            client(port) as alice,
            client(port, BOB) as bob,
        ):
            await up(alice)
            await up(bob)
            before, kept = await echo(router, alice, b"1"), await echo(router, bob, b"b")
            assert alice.send([b"x"] * MAX_FRAMES)  # and the route makes one too many
            assert await news(alice) == LinkNews("down")
            gone = await heard(router)
            assert (gone.conn, gone.frames) == (before.conn, ())
            assert told == [ALICE.public.curve]
            assert (await echo(router, bob, b"c")).conn == kept.conn
            await up(alice)
            await echo(router, alice, b"2")

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")
def test_who_sends_more_than_is_read_is_cut_beyond_its_allowance_and_nobody_else() -> None:
    """Nobody reads: what is read ahead apart, all lies in queues that are bounded in messages."""

    async def test() -> None:
        told: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        allowed = {ALICE.public.curve: 100_000, BOB.public.curve: 10_000_000}
        async with (
            server(allow=allowed.__getitem__, flooded=lambda *args: told.put_nowait(args)) as (
                router,
                port,
            ),
            client(port) as alice,
            client(port, BOB) as bob,
        ):
            await up(alice)
            await up(bob)
            before, kept = await echo(router, alice, b"1"), await echo(router, bob, b"b")
            for dealer in (bob, alice):
                for _ in range(200):
                    assert dealer.send([bytes(10_000)])
            key, why = await asyncio.wait_for(told.get(), 60)
            assert key == ALICE.public.curve
            assert "unsolicited bytes" in why
            seen = [await heard(router)]
            while seen[-1].frames:
                seen.append(await heard(router))
            assert seen[-1].conn == before.conn
            while len([i for i in seen if i.conn == kept.conn]) < 200:
                seen.append(await heard(router))
            assert (await echo(router, bob, b"c")).conn == kept.conn

    run(test)


def test_what_is_read_counts_against_no_allowance_however_much_it_is() -> None:
    async def test() -> None:
        async with server(allow=lambda _: 2000) as (router, port), client(port) as alice:
            await up(alice)
            for _ in range(20):
                await echo(router, alice, bytes(1000))
            assert router._counts.cut_floods(0.0) == []

    run(test)


# --- who is flooded by a server --------------------------------------------------------------


async def flooded(router: Router, dealer: Dealer, frames: list[bytes], times: int) -> None:
    """Send a client that reads nothing more than it may; the link is cut, made again, and works."""
    got = await echo(router, dealer, b"here I am")
    for _ in range(times):
        assert router.send(got.route, frames)
    async with asyncio.timeout(60):
        while dealer._watched is not None and not dealer._watched.is_cut:  # noqa: ASYNC110
            await asyncio.sleep(0)
    seen: list[LinkNews | tuple[bytes, ...]] = []
    while not seen or seen[-1] != LinkNews("up"):
        seen.append(await asyncio.wait_for(dealer.recv(), 60))
    assert [one for one in seen if isinstance(one, LinkNews)] == [
        LinkNews("flooded"),
        LinkNews("down"),
        LinkNews("up"),
    ]
    assert (await heard(router)).frames == ()
    await echo(router, dealer, b"here again")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")
def test_a_client_cuts_a_server_that_sends_more_than_it_reads() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port, retry_s=0.05) as alice:
            await up(alice)
            alice.allow(500_000)
            await flooded(router, alice, [bytes(100_000)], 140)  # what is read ahead included

    run(test)


@pytest.mark.parametrize("frames", [3, 20_000])
def test_a_client_outlives_a_connection_that_ends_in_the_middle_of_much(frames: int) -> None:
    """With a queue that ends with its connection, libzmq ended the process (`!_more`, fq.cpp)."""

    async def test() -> None:
        async with server() as (router, port), client(port, retry_s=0.05) as alice:
            await up(alice)
            alice.allow(1 << 30)
            for _ in range(6):
                got = await echo(router, alice, b"here I am")
                for _ in range(200 if frames == 3 else 1):
                    assert router.send(got.route, [b"", *[bytes(30)] * (frames - 1)])
                router.cut(got.conn)
                seen: list[LinkNews | tuple[bytes, ...]] = []
                while not seen or seen[-1] != LinkNews("up"):
                    seen.append(await asyncio.wait_for(alice.recv(), 60))
                assert LinkNews("down") in seen
                assert (await heard(router)).frames == ()

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")
def test_a_client_cuts_a_server_whose_message_hardly_ends() -> None:
    """None of its frames is delivered before the last one: that takes as much memory as they."""

    async def test() -> None:
        async with server() as (router, port), client(port, retry_s=0.05) as alice:
            await up(alice)
            await flooded(router, alice, [bytes(2 << 20)] * 50, 1)

    run(test)


def test_a_client_cuts_a_server_that_sends_a_message_of_too_many_frames() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port, retry_s=0.05) as alice:
            await up(alice)
            await flooded(router, alice, [b""] * (MAX_FRAMES + 1), 1)

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")
def test_a_window_that_was_requested_after_small_messages_may_come_at_once() -> None:
    """Before its first chunk is read, the frames that were read last are small ones."""

    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            window = 6 << 20
            alice.allow(window)
            got = await echo(router, alice, b"here I am")
            for number in range(200):
                assert router.send(got.route, [b"%d" % number])
                assert await asyncio.wait_for(alice.recv(), 60) == (b"%d" % number,)
            watched = alice._watched
            assert watched is not None
            assert watched.unread.overhead > 30
            for _ in range(window >> 18):
                assert router.send(got.route, [b"chunk", b"", bytes(1 << 18)])
            while watched.probe.received() < window:  # nothing of it is read meanwhile
                pass
            watched.check()
            assert not watched.is_cut

    run(test)


def test_what_a_client_reads_counts_against_no_allowance_however_much_it_is() -> None:
    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            got = await echo(router, alice, b"here I am")
            for _ in range(40):
                assert router.send(got.route, [bytes(200_000)])
                assert await asyncio.wait_for(alice.recv(), 60) == (bytes(200_000),)

    run(test)


def test_a_link_may_be_closed_again() -> None:
    """A relay that stops in a pause between two connections closes one that is closed already."""

    async def test() -> None:
        async with server() as (_, port), client(port, ALICE) as alice:  # closes it, too
            await up(alice)
            alice.close()

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")
def test_a_link_that_is_refused_or_closed_is_not_watched() -> None:
    """A watched connection that libzmq has closed stays half open."""

    async def test() -> None:
        shared = Links(2)
        async with server() as (router, port):
            async with (
                client(port, links=shared) as alice,
                client(port, STRANGER, links=shared) as stranger,
            ):
                await up(alice)
                assert await news(stranger) == LinkNews("refused", "unknown_client")
                await echo(router, alice, b"x")
                assert len(shared.watch._watched) == 1
            assert shared.watch._watched == {}
            assert shared.watch._poll is None
            assert (await heard(router)).frames == ()
        shared.close()

    run(test)


# --- listening ------------------------------------------------------------------------------


def test_a_port_in_use_is_said_with_its_number() -> None:
    async def test() -> None:
        async with server() as (_, port):
            router = Router(
                curve_secret=SERVER.curve_secret,
                curve_public=SERVER.public.curve,
                admit=KNOWN.__contains__,
            )
            try:
                with pytest.raises(PortInUse, match=str(port)):
                    router.bind(HOST, port)
            finally:
                router.close()

    run(test)


def test_an_address_of_another_machine_is_refused_in_a_sentence() -> None:
    async def test() -> None:
        async with server() as (router, _):
            with pytest.raises(LinkError, match=r"203\.0\.113\.1:7710") as error:
                router.bind("203.0.113.1", 7710)
            assert "listen" in error.value.action

    run(test)


def test_ipv6_is_spoken() -> None:
    async def test() -> None:
        async with server() as (router, _):
            try:
                port = router.bind("::1", 0)
            except LinkError:
                pytest.skip("this machine has no IPv6")
            dealer = Dealer(
                curve_secret=ALICE.curve_secret,
                curve_public=ALICE.public.curve,
                server_key=SERVER.public.curve,
                heartbeat_s=LONG,
            )
            dealer.connect("::1", port)
            try:
                await up(dealer)
                await echo(router, dealer, b"six")
            finally:
                dealer.close()

    run(test)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_links_that_share_have_no_threads_of_their_own_and_end_one_by_one() -> None:
    async def test() -> None:
        shared = Links(2)
        async with server() as (router, port), client(port, ALICE, links=shared) as alice:
            await up(alice)
            before = threads()
            async with client(port, BOB, links=shared) as bob:
                await up(bob)
                assert threads() == before
                for dealer, keys in ((alice, ALICE), (bob, BOB)):
                    assert (await echo(router, dealer, b"x")).key == keys.public.curve
            assert (await heard(router)).key == BOB.public.curve  # it has left
            await echo(router, alice, b"still here")
        shared.close()

    run(test)


def test_a_link_of_many_tells_its_own_news_alone() -> None:
    async def test() -> None:
        shared = Links(2)
        async with (
            server(lambda key: key == ALICE.public.curve) as (_, port),
            client(port, ALICE, links=shared) as alice,
            client(port, BOB, links=shared) as bob,
        ):
            assert await news(bob) == LinkNews("refused", "unknown_client")
            await up(alice)
        shared.close()

    run(test)


# --- what it costs --------------------------------------------------------------------------


class Counter:
    """A TCP relay on loopback that counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.up = 0
        self.down = 0
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self.listener = await asyncio.start_server(self._serve, HOST, 0)
        port: int = self.listener.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(HOST, self.target)
        for task in (
            asyncio.ensure_future(self._pipe(reader, there_writer, "up")),
            asyncio.ensure_future(self._pipe(there_reader, writer, "down")),
        ):
            self.tasks.add(task)

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while data := await reader.read(65536):
                setattr(self, way, getattr(self, way) + len(data))
                self.changed.set()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def until(self, up: int, down: int) -> None:
        while (self.up, self.down) != (up, down):
            assert self.up <= up, (self.up, up)
            assert self.down <= down, (self.down, down)
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    async def stop(self) -> None:
        self.listener.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_the_predicted_bytes_of_handshake_and_messages_are_those_on_the_wire() -> None:
    """Both directions, byte for byte, around every boundary of the frame's length field."""
    shapes = [[s] for s in (0, 1, 100, 221, 222, 223, 254, 255, 256, 300, 70_000)]
    shapes += [[200, 64, 16_384], [100, 0], [0, 0, 0]]

    async def test() -> None:
        async with server() as (router, port):
            counter = Counter(port)
            async with client(await counter.start()) as alice:
                await up(alice)
                sent_up, sent_down = HANDSHAKE_UP_BYTES, HANDSHAKE_DOWN_BYTES
                await counter.until(sent_up, sent_down)
                for shape in shapes:
                    frames = [bytes(size) for size in shape]
                    assert alice.send(frames)
                    got = await heard(router)
                    sent_up += wire_bytes(frames)
                    await counter.until(sent_up, sent_down)
                    assert router.send(got.route, frames)
                    assert await alice.recv() == tuple(frames)
                    sent_down += wire_bytes(frames)
                    await counter.until(sent_up, sent_down)
            await counter.stop()

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_the_kernel_counts_what_is_predicted() -> None:
    """TCP_INFO of the server's own socket, read through the descriptor of the message."""

    async def test() -> None:
        async with server() as (router, port), client(port) as alice:
            await up(alice)
            got = await echo(router, alice, b"x" * 300)
            fd, _ = router._connections.of(got.conn)
            with socket.socket(fileno=os.dup(fd)) as twin:
                info = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            received = int.from_bytes(info[128:136], "little")
            assert received == HANDSHAKE_UP_BYTES + frame_wire_bytes(300)

    run(test)


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 35), (222, 257), (223, 265), (1 << 20, (1 << 20) + 42)]
)
def test_a_frame_costs_its_box_and_a_short_or_long_length(size: int, expected: int) -> None:
    assert frame_wire_bytes(size) == expected
    assert wire_bytes([bytes(size)] * 3) == 3 * expected


# Connections. The strangers take some more, and another for each that is cut: a handshake takes a
# few of their turns, and the server has this many before it cuts the member as the oldest.
ROOM = 400
CROWD = """
import select, socket, sys

def come():
    one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    ends.register(one, select.EPOLLRDHUP)
    held[one.fileno()] = one

ends, held = select.epoll(), {}
for _ in range(8 + int(sys.argv[2])):
    come()
while True:
    for fd, _ in ends.poll():
        held.pop(fd).close()
        come()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such filters")
def test_strangers_that_take_all_connections_keep_no_member_out(monkeypatch) -> None:
    """They come again at once, for as long as the member speaks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(zmq_link, "spare_descriptors", lambda: soft - 2 * ROOM)
    said: list[str] = []
    crowded = asyncio.Event()

    def cut(_key: bytes, text: str) -> None:
        said.append(text)
        crowded.set()

    async def test() -> None:
        async with server(flooded=cut) as (router, port):
            crowd = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", CROWD, str(port), str(ROOM)
            )
            try:
                await crowded.wait()
                async with client(port) as alice:
                    while (await news(alice)).state != "up":
                        pass  # its connection was among the crowd's, and it tries again
                    for _ in range(20):
                        assert (await echo(router, alice, b"here")).key == ALICE.public.curve
            finally:
                crowd.kill()
                await crowd.wait()

    run(test)
    assert set(said) == {zmq_link.CROWDED}
